// What all kernels of Hopper's pipe have in common, for the host too.
//
// Such a kernel is a ring of stages (ring.h), which one warpgroup has the copy engine fill with boxes of operands
// (operand.h) for one job after another (jobs.h), and which the others multiply (wgmma.h) and store (out.h).
#pragma once

namespace pydet {

constexpr int kWarpgroup = 128;              // threads, which the tensor cores take as one
constexpr int kWarpRows = 16;                // of a product, that one warp of it has
constexpr int kStep = 16;                    // k of one step of 16-bit operands
constexpr int kBlockK = 64;                  // k of one box of them
constexpr int kRowBytes = 2 * kBlockK;       // of every box: what the swizzle of 128 bytes spans
constexpr int kAtomRows = 8;                 // of that swizzle
constexpr int kBlockBytes = 64 * kRowBytes;  // of a box of 64 rows

}  // namespace pydet
