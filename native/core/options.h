// Options: structures whose size the caller states, flags, and the workspace.
#pragma once

#include "core/view.h"

namespace pydet {

// The sizes that a structure of the ABI had in releases before this one, ascending. One that grows gets the size that it
// grew from; tests/test_options.py has the structures of each release, and holds them to it.
template <class Struct> struct EarlierSizes {
  static constexpr uint32_t sizes[] = {sizeof(Struct)};
};
template <> struct EarlierSizes<pydet_gemm_options> {
  static constexpr uint32_t sizes[] = {48};
};
template <> struct EarlierSizes<pydet_skinny_gemm_options> {
  static constexpr uint32_t sizes[] = {56};
};
template <> struct EarlierSizes<pydet_rmsnorm_options> {
  static constexpr uint32_t sizes[] = {24};
};
template <> struct EarlierSizes<pydet_rmsnorm_backward_options> {
  static constexpr uint32_t sizes[] = {40};
};

// A caller's size: this release's or an earlier one's, or a later release's, of which more is known below.
template <class Struct> pydet_status check_size(const char *op, const char *name, uint32_t size) {
  constexpr uint32_t kMost = 4096;  // of any later release: beyond it, nobody set the size
  bool known = size >= sizeof(Struct) && size <= kMost && size % alignof(Struct) == 0;
  for (uint32_t earlier : EarlierSizes<Struct>::sizes) known |= size == earlier;
  if (known) return PYDET_OK;
  return fail(PYDET_INVALID_VALUE, "%s: %s.struct_size is %u, want %zu", op, name, unsigned(size), sizeof(Struct));
}

// Options of an earlier release are shorter: what they lack is 0. Those of a later one are longer: this release does what
// they ask for only if all that it does not know is 0.
template <class Options> pydet_status read_options(const char *op, const Options *given, Options *options) {
  if (!given) return PYDET_OK;
  const uint32_t size = given->struct_size;
  PYDET_TRY(check_size<Options>(op, "options", size));
  const char *bytes = reinterpret_cast<const char *>(given);
  for (uint32_t i = sizeof(Options); i < size; ++i)
    if (bytes[i] != 0)
      return fail(PYDET_UNSUPPORTED,
                  "%s: options.struct_size is %u and byte %u is not 0: this release knows the first %zu", op,
                  unsigned(size), unsigned(i), sizeof(Options));
  *options = {};
  memcpy(static_cast<void *>(options), given, size < sizeof(Options) ? size : sizeof(Options));
  options->struct_size = sizeof(Options);
  if (options->reserved != 0)
    return fail(PYDET_INVALID_VALUE, "%s: options.reserved is %d, want 0", op, int(options->reserved));
  return PYDET_OK;
}

// Of a number that logits or scores are multiplied with or divided by. or_none: 0, of either sign, is "none". Whether it
// is 0 its bits say, since a thread may be set to read subnormals as zeros.
inline pydet_status check_scale(const char *op, const char *name, float value, bool or_none) {
  if ((or_none && bits_of(value) << 1 == 0) || (value >= 0x1p-100f && value <= 0x1p100f)) return PYDET_OK;
  return fail(PYDET_INVALID_VALUE, "%s: %s is %g, want a number from 2^-100 to 2^100", op, name, double(value));
}

// Fills in what a caller asked for in a structure of its release's size. What this release does not know becomes 0.
template <class Info> void write_info(const Info &filled, Info *info) {
  const uint32_t size = info->struct_size;
  const uint32_t known = size < sizeof(Info) ? size : uint32_t(sizeof(Info));
  memset(static_cast<void *>(info), 0, size);
  memcpy(static_cast<void *>(info), &filled, known);
  info->struct_size = size;
}

inline pydet_status check_flag(const char *op, const char *name, int64_t value) {
  if (value == 0 || value == 1) return PYDET_OK;
  return fail(PYDET_INVALID_VALUE, "%s: options.%s is %" PRId64 ", want 0 or 1", op, name, value);
}

// A chunk is none where it is 0, which is C's word for it, and None Python's.
inline pydet_status check_chunk(const char *op, int64_t k_chunk, int multiple) {
  if (k_chunk >= 0 && k_chunk % multiple == 0) return PYDET_OK;
  return fail(PYDET_INVALID_VALUE,
              "%s: k_chunk is %" PRId64 ", want a positive multiple of %d, or none (0 in C, None in Python)", op,
              k_chunk, multiple);
}

inline pydet_status check_workspace(const char *op, const void *workspace, uint64_t size) {
  if (!workspace && size) return fail(PYDET_NULL_POINTER, "%s: workspace is NULL, workspace_size %" PRIu64, op, size);
  if (reinterpret_cast<uintptr_t>(workspace) % 16)
    return fail(PYDET_MISALIGNED, "%s: workspace is at %p, want a multiple of 16 bytes", op, workspace);
  uint64_t end = 0;
  if (__builtin_add_overflow(reinterpret_cast<uintptr_t>(workspace), size, &end) || end > kMaxAddress)
    return fail(PYDET_OVERFLOW, "%s: workspace at %p is %" PRIu64 " bytes, which reaches past 2^63 - 1", op, workspace,
                size);
  return PYDET_OK;
}

inline pydet_status workspace_apart(const View &view, const void *workspace, uint64_t size) {
  if (!view.present() || view.empty() || !workspace) return PYDET_OK;
  Footprint f = footprint(view);
  uintptr_t begin = reinterpret_cast<uintptr_t>(workspace);
  if (f.end <= begin || begin + size <= f.begin) return PYDET_OK;
  return fail(PYDET_OVERLAP, "%s: workspace shares memory with %s, want it apart", view.op, view.name);
}
template <size_t count>
pydet_status workspace_apart(const View *const (&views)[count], const void *workspace, uint64_t size) {
  for (const View *view : views) PYDET_TRY(workspace_apart(*view, workspace, size));
  return PYDET_OK;
}

}  // namespace pydet
