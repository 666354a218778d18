// Large scratch memory lies in slots: one for every thread that computes at the same time, as many as there ever were.
// A slot is taken by one compare and swap, so a signal handler may take another while its thread holds one.

#include "cpu/scratch.h"

#include <atomic>
#include <sys/mman.h>

namespace pydet {
namespace {

struct alignas(64) Slot {
  std::atomic<bool> taken{false};
  void *memory = nullptr;  // who took the slot may read and set it
};

constexpr int kSlots = 2048;
Slot slots[kSlots];
thread_local int last_slot = 0;  // likely to be in this core's cache

bool take(Slot &slot) {
  bool free = false;
  return !slot.taken.load(std::memory_order_relaxed) &&
         slot.taken.compare_exchange_strong(free, true, std::memory_order_acquire, std::memory_order_relaxed);
}

void give_back(Slot &slot) { slot.taken.store(false, std::memory_order_release); }

}  // namespace

Scratch::Scratch() {
  bool may_map = true;
  for (int i = 0, index = last_slot; i < kSlots; ++i, index = (index + 1) % kSlots) {
    Slot &slot = slots[index];
    if (!take(slot)) continue;
    if (!slot.memory && may_map) {
      void *memory = mmap(nullptr, size_t(kLarge), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (memory == MAP_FAILED) may_map = false;
      else slot.memory = memory;
    }
    if (slot.memory) {
      slot_ = last_slot = index;
      data = slot.memory;
      return;
    }
    give_back(slot);
  }
}

void Scratch::free_all() {
  for (Slot &slot : slots) give_back(slot);
}

Scratch::~Scratch() {
  if (large()) give_back(slots[slot_]);
}

}  // namespace pydet
