// Which of the variants of a kernel computes a problem.
#pragma once

#include <cstring>
#include <type_traits>

namespace pydet {

// Which of the variants of a kernel computes a problem, and how it cuts it. A variant's launch receives it, so that nothing
// is worked out twice.
class Choice {
 public:
  int variant = -1;  // none takes the problem

  Choice() = default;
  template <class Cut> Choice(int chosen, const Cut &cut) : variant(chosen) {
    static_assert(std::is_trivially_copyable_v<Cut> && sizeof cut <= sizeof cut_, "carried as bytes");
    memcpy(cut_, &cut, sizeof cut);
  }
  explicit Choice(int chosen) : variant(chosen) {}

  // As it was given.
  template <class Cut> Cut cut() const {
    Cut cut;
    memcpy(&cut, cut_, sizeof cut);
    return cut;
  }

 private:
  unsigned char cut_[64] = {};
};
constexpr int kAnyVariant = -1;  // the fastest

}  // namespace pydet
