// Memory that a CPU kernel packs operands into. It is not the caller's stack, of which little may be left.
#pragma once

#include <cstdint>

namespace pydet {

// What one thread works in while it computes, 64-byte aligned and not initialised. The default is kLarge bytes that the
// library maps when they are first needed and keeps for later calls; data is NULL where no more are to be had. Then the
// caller's thread makes do with kSmall bytes of its stack (with_scratch in parallel.h) and cuts its work smaller.
class Scratch {
 public:
  static constexpr int64_t kLarge = 1024 * 1024, kSmall = 8 * 1024;
  static constexpr int64_t kWalked = 512 * 1024;  // of kLarge, what is passed over again and again: half of an L2

  Scratch();
  explicit Scratch(void *small) : data(small) {}
  ~Scratch();
  Scratch(const Scratch &) = delete;
  Scratch &operator=(const Scratch &) = delete;

  static void free_all();  // after a fork: no other thread is left to hold any

  bool large() const { return slot_ >= 0; }

  void *data = nullptr;

 private:
  int slot_ = -1;
};

}  // namespace pydet
