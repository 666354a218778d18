// What the library asks of an operation: that of one problem, in the problem's own header.
#pragma once

#include <initializer_list>

#include "contract/arithmetic.h"
#include "contract/features.h"
#include "contract/operand.h"

struct pydet_exchange_method;  // entry/python.h
struct pydet_xla_handler;      // entry/xla_ffi.h

namespace pydet {

// Strides and addresses that can be in no kernel's way: all begins at multiples of `kRoom` elements.
constexpr int64_t kRoom = 128;
inline int64_t with_room(int64_t stride) { return stride / kRoom * kRoom + (stride % kRoom ? kRoom : 0); }
inline void give_room(char *&data) {
  if (data) data -= reinterpret_cast<uintptr_t>(data) % (4 * kRoom);
}
inline void give_room(Rows &rows) {
  give_room(rows.data);
  rows.outer_stride = with_room(rows.outer_stride);
  rows.inner_stride = with_room(rows.inner_stride);
}

// Those of an array, be it none.
template <class Item> struct Items {
  const Item *first = nullptr;
  int count = 0;

  constexpr Items() = default;
  template <int size> constexpr Items(const Item (&items)[size]) : first(items), count(size) {}
  const Item *begin() const { return first; }
  const Item *end() const { return first + count; }
};

// Functions of pydet.h.
template <auto... functions> struct FunctionList {};

// `name`, of the table; `input`: the type by which kernels are chosen; `arithmetic` likewise; `memory` shows the data of
// all operands. What else there is, it has of AnyOperation.
template <class Problem> struct Operation;

struct AnyOperation {
  // Makes of a problem the same where no stride and no address can be in a kernel's way: elements along k or along the
  // row are adjacent. Of no use but to be shown to a row. False where these are not known to matter.
  template <class Problem> static bool lay_well(Problem &) { return false; }
  // Takes its k_chunk away; false where it has none.
  template <class Problem> static bool drop_chunks(Problem &) { return false; }

  using Functions = FunctionList<>;              // that its methods call
  static Items<pydet_exchange_method> python();  // its folder's, of one operation of the folder: here none
  static Items<pydet_xla_handler> xla();         // likewise
};

// The arithmetic by which kernels are chosen.
struct AsAsked : AnyOperation {
  template <class Problem> static Arithmetic arithmetic(const Problem &problem) { return problem.arithmetic; }
};
struct AlwaysIeee : AnyOperation {
  template <class Problem> static Arithmetic arithmetic(const Problem &) { return Arithmetic::ieee; }
};

}  // namespace pydet
