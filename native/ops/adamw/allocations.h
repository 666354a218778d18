// A step has hundreds of tensors, and a device's driver says of one at a time where it lies. Most of them lie in a few
// allocations, so it is asked once for each of those.
#pragma once

#include "core/kernel.h"
#include "ops/adamw/problem.h"

namespace pydet {

// Memory from `begin` on, up to `end`.
struct Allocation {
  uintptr_t begin, end;
  bool has(const void *at) const {
    const uintptr_t place = reinterpret_cast<uintptr_t>(at);
    return begin <= place && place < end;
  }
};

template <> struct Hooks<AdamW> {
  // The allocation of the driver's that this memory is part of; an empty one of memory that it does not know.
  Allocation (*allocation)(const void *);
};

// Those that tensors of one call were found in, the last few.
class Allocations {
 public:
  // Whether it is in one.
  bool has(const Hooks<AdamW> &hooks, const void *at) {
    for (const Allocation &one : known_)
      if (one.has(at)) return true;
    const Allocation own = hooks.allocation(at);
    if (own.has(at)) known_[next_++ % kMost] = own;
    return own.has(at);
  }

 private:
  static constexpr unsigned kMost = 16;
  Allocation known_[kMost] = {};
  unsigned next_ = 0;
};

}  // namespace pydet
