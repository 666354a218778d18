// What recurrences over tokens and their gradients read, write and add on the CPU: rows of elements of any stride, columns
// side by side in vectors, sums in lanes.
#pragma once

#include "contract/elementary.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace pydet {
namespace {

constexpr int kColumns = 32;
static_assert(kColumns % kWidth == 0, "whole vectors");
constexpr double kWorthAThread = 1 << 16;  // multiply-adds

// `count` elements that lie `stride` apart.
inline void read_row(const Strided &from, int64_t offset, int64_t stride, int64_t count, float *to) {
  dispatch(from.type, [&](auto number) {
    using T = decltype(number);
    const auto *at = (const typename T::Stored *)from.data + offset;
    int64_t i = 0;
    if (stride == 1)
      for (; i + kWidth <= count; i += kWidth) store(to + i, T::load(at + i));
    for (; i < count; ++i) to[i] = T::get(at + i * stride);
  });
}
inline void write_row(const Strided &to, int64_t offset, int64_t stride, int64_t count, const float *from) {
  dispatch(to.type, [&](auto number) {
    using T = decltype(number);
    auto *at = (typename T::Stored *)to.data + offset;
    int64_t i = 0;
    if (stride == 1)
      for (; i + kWidth <= count; i += kWidth) T::store(at + i, load(from + i));
    for (; i < count; ++i) T::set(at + i * stride, from[i]);
  });
}
inline float read_one(const Strided &from, int64_t offset) {
  float x;
  read_row(from, offset, 0, 1, &x);
  return x;
}

// Vectors of so many columns, or one column where there is no memory for more.
template <int columns> struct Vectors {
  static constexpr int kCount = columns / kWidth;
  Floats v[kCount];

  static Vectors of(const float *p) {
    Vectors x;
    for (int i = 0; i < kCount; ++i) x.v[i] = load(p + i * kWidth);
    return x;
  }
  static Vectors all(float a) {
    Vectors x;
    for (int i = 0; i < kCount; ++i) x.v[i] = broadcast(a);
    return x;
  }
  void to(float *p) const {
    for (int i = 0; i < kCount; ++i) store(p + i * kWidth, v[i]);
  }
  Vectors operator+(const Vectors &y) const {
    Vectors x;
    for (int i = 0; i < kCount; ++i) x.v[i] = v[i] + y.v[i];
    return x;
  }
  Vectors operator*(const Vectors &y) const {
    Vectors x;
    for (int i = 0; i < kCount; ++i) x.v[i] = v[i] * y.v[i];
    return x;
  }
  friend Vectors fma(const Vectors &a, const Vectors &b, const Vectors &c) {
    Vectors x;
    for (int i = 0; i < kCount; ++i) x.v[i] = fma(a.v[i], b.v[i], c.v[i]);
    return x;
  }
  friend Vectors fma(float a, const Vectors &b, const Vectors &c) {
    Vectors x;
    for (int i = 0; i < kCount; ++i) x.v[i] = fma(broadcast(a), b.v[i], c.v[i]);
    return x;
  }
};
template <> struct Vectors<1> {
  float v;

  static Vectors of(const float *p) { return {*p}; }
  static Vectors all(float a) { return {a}; }
  void to(float *p) const { *p = v; }
  Vectors operator+(const Vectors &y) const { return {v + y.v}; }
  Vectors operator*(const Vectors &y) const { return {v * y.v}; }
  friend Vectors fma(const Vectors &a, const Vectors &b, const Vectors &c) { return {fmaf(a.v, b.v, c.v)}; }
  friend Vectors fma(float a, const Vectors &b, const Vectors &c) { return {fmaf(a, b.v, c.v)}; }
};

// The sum over the states of step(n, sum), of which each lane walks its own from +0.
template <class Sums, class Step> inline __attribute__((always_inline)) Sums sum_of_lanes(int64_t states,
                                                                                          const Step &step) {
  Sums lane[kScanLanes];
  for (int e = 0; e < kScanLanes; ++e) {
    Sums sum = Sums::all(0.0f);
    int64_t n = e * kScanLaneElements;
    for (; n + kScanLaneElements <= states; n += kScanRound)
      for (int i = 0; i < kScanLaneElements; ++i) sum = step(n + i, sum);
    for (; n < states && n % kScanRound / kScanLaneElements == e; ++n) sum = step(n, sum);
    lane[e] = sum;
  }
  for (int h = kScanLanes / 2; h; h /= 2)
    for (int e = 0; e < h; ++e) lane[e] = lane[e] + lane[e + h];
  return lane[0];
}

// Neighbouring columns of heads, [first, first + count) of a group's or of one head's: how they lie in an operand that has
// strides for both.
struct Neighbours {
  int64_t width, first, count;
  bool one_head;

  void read(const Strided &from, int64_t offset, int64_t head_stride, int64_t stride, float *to) const {
    each_run(head_stride, stride,
             [&](int64_t at, int64_t step, int64_t i, int64_t run) { read_row(from, offset + at, step, run, to + i); });
  }
  void write(const Strided &to, int64_t offset, int64_t head_stride, int64_t stride, const float *from) const {
    each_run(head_stride, stride, [&](int64_t at, int64_t step, int64_t i, int64_t run) {
      write_row(to, offset + at, step, run, from + i);
    });
  }
  // Of what there is one for each head.
  void read_heads(const Strided &from, int64_t offset, int64_t head_stride, float *to) const {
    read(from, offset, head_stride, 0, to);
  }

 private:
  // Runs of columns whose elements are the same step apart.
  template <class Run> void each_run(int64_t head_stride, int64_t stride, const Run &run) const {
    if (width == 1) return run(first * head_stride, head_stride, 0, count);
    if (head_stride == stride * width) return run(first * stride, stride, 0, count);
    for (int64_t i = 0; i < count;) {
      const int64_t column = first + i, within = column % width;
      const int64_t length = width - within < count - i ? width - within : count - i;
      run(column / width * head_stride + within * stride, stride, i, length);
      i += length;
    }
  }
};

}  // namespace
}  // namespace pydet
