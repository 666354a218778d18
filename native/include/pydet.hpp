// pydet in C++17: pydet.h with views for descriptors and exceptions for statuses. Header only; it owns nothing and
// allocates nothing but the text of an exception. What an operation computes, and what it takes, stands in pydet.h.
//
//   pydet::tensor a(a_data, {64, 4096}), b(b_data, {4096, 1024}), c(c_data, {64, 1024});  // fp32, on the CPU
//   pydet::gemm(nullptr, a, b, {}, c);                                                    // {}: no bias
//
//   pydet::tensor x(x_data, {64, 4096}, pydet::cuda()), ...                               // on GPU 0
//   auto options = pydet::options<pydet_skinny_gemm_options>();
//   options.weights_constant = 1;
//   pydet::skinny_gemm(stream, x, w, {}, y, &options);
#ifndef PYDET_HPP
#define PYDET_HPP

#include <algorithm>
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "pydet.h"

namespace pydet {

// What the library refused: what() is its sentence.
class error : public std::runtime_error {
 public:
  error(pydet_status status, const std::string &sentence) : std::runtime_error(sentence), status_(status) {}
  pydet_status status() const noexcept { return status_; }
  const char *status_name() const noexcept { return pydet_status_name(status_); }

 private:
  pydet_status status_;
};

template <class... Parts> [[noreturn]] void refuse(pydet_status status, const Parts &...parts) {
  std::ostringstream sentence;
  (sentence << ... << parts);
  throw error(status, sentence.str());
}

// 16- and 8-bit elements, as their bits. dtype_of is specialised for other types of the same layout:
//   template <> struct pydet::dtype_of<__nv_bfloat16> : pydet::dtype_of<pydet::bfloat16> {};
enum class bfloat16 : uint16_t {};
enum class float16 : uint16_t {};
enum class float8_e4m3fn : uint8_t {};
enum class float8_e5m2 : uint8_t {};
enum class float8_e8m0fnu : uint8_t {};
template <class T> struct dtype_of;
template <> struct dtype_of<float8_e4m3fn> {
  static constexpr pydet_dtype value{PYDET_FLOAT8_E4M3FN, 8, 1};
};
template <> struct dtype_of<float8_e5m2> {
  static constexpr pydet_dtype value{PYDET_FLOAT8_E5M2, 8, 1};
};
template <> struct dtype_of<float8_e8m0fnu> {
  static constexpr pydet_dtype value{PYDET_FLOAT8_E8M0FNU, 8, 1};
};
template <> struct dtype_of<float> {
  static constexpr pydet_dtype value{PYDET_FLOAT, 32, 1};
};
template <> struct dtype_of<float16> {
  static constexpr pydet_dtype value{PYDET_FLOAT, 16, 1};
};
template <> struct dtype_of<int32_t> {
  static constexpr pydet_dtype value{PYDET_INT, 32, 1};
};
template <> struct dtype_of<int64_t> {
  static constexpr pydet_dtype value{PYDET_INT, 64, 1};
};
template <> struct dtype_of<bool> {
  static_assert(sizeof(bool) == 1, "a byte each");
  static constexpr pydet_dtype value{PYDET_BOOL, 8, 1};
};
template <> struct dtype_of<bfloat16> {
  static constexpr pydet_dtype value{PYDET_BFLOAT, 16, 1};
};

constexpr pydet_device cpu() { return {PYDET_CPU, 0}; }
constexpr pydet_device cuda(int32_t id = 0) { return {PYDET_CUDA, id}; }
constexpr pydet_device rocm(int32_t id = 0) { return {PYDET_ROCM, id}; }

// The C descriptor of a tensor; of an absent one, NULL.
struct descriptor {
  pydet_tensor c;
  bool given;
  operator const pydet_tensor *() const { return given ? &c : nullptr; }
};

// A view of memory that stays the caller's; `tensor()` is an operand that is absent. Strides are in elements.
class tensor {
 public:
  static constexpr size_t kMaxRank = 8;  // a matrix and the six batch dimensions that pydet.h allows

  tensor() = default;

  template <class T> tensor(T *data, size_t rank, const int64_t *shape, const int64_t *strides,
                            pydet_device device = cpu())
      : data_(const_cast<std::remove_const_t<T> *>(data)),
        device_(device),
        dtype_(dtype_of<std::remove_const_t<T>>::value),
        rank_(rank),
        given_(true) {
    if (rank > kMaxRank) refuse(PYDET_INVALID_SHAPE, "pydet::tensor: rank ", rank, ", want 0 to 8");
    std::copy(shape, shape + rank, shape_);
    std::copy(strides, strides + rank, strides_);
  }

  template <class T> tensor(T *data, std::initializer_list<int64_t> shape, std::initializer_list<int64_t> strides,
                            pydet_device device = cpu())
      : tensor(data, shape.size(), shape.begin(), strides.begin(), device) {
    if (shape.size() != strides.size())
      refuse(PYDET_INVALID_STRIDE, "pydet::tensor: ", strides.size(), " strides, want ", shape.size());
  }

  // In C order.
  template <class T> tensor(T *data, std::initializer_list<int64_t> shape, pydet_device device = cpu())
      : tensor(data, shape.size(), shape.begin(), shape.begin(), device) {
    int64_t stride = 1;
    for (size_t i = rank_; i-- > 0; stride *= shape_[i]) strides_[i] = stride;
  }

  // The same memory with its last two dimensions exchanged.
  tensor transposed() const {
    if (rank_ < 2) refuse(PYDET_INVALID_SHAPE, "pydet::tensor::transposed: rank ", rank_, ", want 2 to 8");
    tensor result = *this;
    std::swap(result.shape_[rank_ - 2], result.shape_[rank_ - 1]);
    std::swap(result.strides_[rank_ - 2], result.strides_[rank_ - 1]);
    return result;
  }

  // It points into this object.
  descriptor describe() const {
    return {{data_, device_, static_cast<int32_t>(rank_), dtype_, const_cast<int64_t *>(shape_),
             const_cast<int64_t *>(strides_), 0},
            given_};
  }

 private:
  void *data_ = nullptr;
  pydet_device device_{};
  pydet_dtype dtype_{};
  size_t rank_ = 0;
  bool given_ = false;
  int64_t shape_[kMaxRank] = {}, strides_[kMaxRank] = {};
};

// Options at their defaults.
template <class Options> Options options() {
  Options result{};
  result.struct_size = sizeof(Options);
  if constexpr (std::is_same_v<Options, pydet_rmsnorm_options>) result.eps = 1e-6f;
  if constexpr (std::is_same_v<Options, pydet_layernorm_options>) result.eps = 1e-5f;
  return result;
}

// Whether the library that was loaded is one that this program was compiled for. Every call below asks first.
inline void check_library() {
  if (pydet_abi() != PYDET_ABI || pydet_numerics() != PYDET_NUMERICS)
    refuse(PYDET_UNSUPPORTED, "the pydet library, release ", pydet_version(), ", has ABI ", pydet_abi(),
           " and NUMERICS ", pydet_numerics(), "; this program was compiled for ", int(PYDET_ABI), " and ",
           int(PYDET_NUMERICS), ": load that library, or compile anew");
}

template <class... Parameters, class... Arguments>
void call(pydet_status (*function)(Parameters...), const Arguments &...arguments) {
  check_library();
  if (pydet_status status = function(arguments...)) throw error(status, pydet_last_error());
}

inline void gemm(void *stream, const tensor &a, const tensor &b, const tensor &bias, const tensor &out,
                 const pydet_gemm_options *options = nullptr) {
  call(pydet_gemm, stream, a.describe(), b.describe(), bias.describe(), out.describe(), options);
}
inline void gemm_da(void *stream, const tensor &dc, const tensor &b, const tensor &da,
                    const pydet_gemm_options *options = nullptr) {
  call(pydet_gemm_da, stream, dc.describe(), b.describe(), da.describe(), options);
}
inline void gemm_db(void *stream, const tensor &a, const tensor &dc, const tensor &db,
                    const pydet_gemm_options *options = nullptr) {
  call(pydet_gemm_db, stream, a.describe(), dc.describe(), db.describe(), options);
}
inline void skinny_gemm(void *stream, const tensor &x, const tensor &w, const tensor &bias, const tensor &y,
                        const pydet_skinny_gemm_options *options = nullptr) {
  call(pydet_skinny_gemm, stream, x.describe(), w.describe(), bias.describe(), y.describe(), options);
}
inline void scaled_gemm(void *stream, const tensor &a, const tensor &a_scale, const tensor &b, const tensor &b_scale,
                        const tensor &bias, const tensor &out, const pydet_scaled_gemm_options *options = nullptr) {
  call(pydet_scaled_gemm, stream, a.describe(), a_scale.describe(), b.describe(), b_scale.describe(), bias.describe(),
       out.describe(), options);
}
inline void quantize(void *stream, const tensor &x, const tensor &out, const tensor &scale, const tensor &transposed,
                     const tensor &transposed_scale, const pydet_quantize_options *options = nullptr) {
  call(pydet_quantize, stream, x.describe(), out.describe(), scale.describe(), transposed.describe(),
       transposed_scale.describe(), options);
}
inline void grouped_gemm(void *stream, const tensor &a, const tensor &b, const tensor &bias, const tensor &group_start,
                         const tensor &group_end, const tensor &out,
                         const pydet_grouped_gemm_options *options = nullptr) {
  call(pydet_grouped_gemm, stream, a.describe(), b.describe(), bias.describe(), group_start.describe(),
       group_end.describe(), out.describe(), options);
}
inline void scaled_grouped_gemm(void *stream, const tensor &a, const tensor &a_scale, const tensor &b,
                                const tensor &b_scale, const tensor &bias, const tensor &group_start,
                                const tensor &group_end, const tensor &out,
                                const pydet_scaled_grouped_gemm_options *options = nullptr) {
  call(pydet_scaled_grouped_gemm, stream, a.describe(), a_scale.describe(), b.describe(), b_scale.describe(),
       bias.describe(), group_start.describe(), group_end.describe(), out.describe(), options);
}
inline void rmsnorm(void *stream, const tensor &x, const tensor &residual, const tensor &weight, const tensor &y,
                    const tensor &rstd, const tensor &sum, const pydet_rmsnorm_options *options = nullptr) {
  call(pydet_rmsnorm, stream, x.describe(), residual.describe(), weight.describe(), y.describe(), rstd.describe(),
       sum.describe(), options);
}
inline void rmsnorm_quantize(void *stream, const tensor &x, const tensor &residual, const tensor &weight,
                             const tensor &out, const tensor &scale, const tensor &y, const tensor &rstd,
                             const tensor &sum, const pydet_rmsnorm_quantize_options *options = nullptr) {
  call(pydet_rmsnorm_quantize, stream, x.describe(), residual.describe(), weight.describe(), out.describe(),
       scale.describe(), y.describe(), rstd.describe(), sum.describe(), options);
}

inline void rmsnorm_backward(void *stream, const tensor &dy, const tensor &x, const tensor &weight, const tensor &rstd,
                             const tensor &dresidual, const tensor &dx, const tensor &dweight,
                             const pydet_rmsnorm_backward_options *options = nullptr) {
  call(pydet_rmsnorm_backward, stream, dy.describe(), x.describe(), weight.describe(), rstd.describe(),
       dresidual.describe(), dx.describe(), dweight.describe(), options);
}
inline void layernorm(void *stream, const tensor &x, const tensor &residual, const tensor &weight, const tensor &bias,
                      const tensor &y, const tensor &mean, const tensor &rstd, const tensor &sum,
                      const pydet_layernorm_options *options = nullptr) {
  call(pydet_layernorm, stream, x.describe(), residual.describe(), weight.describe(), bias.describe(), y.describe(),
       mean.describe(), rstd.describe(), sum.describe(), options);
}
inline void layernorm_backward(void *stream, const tensor &dy, const tensor &x, const tensor &weight,
                               const tensor &mean, const tensor &rstd, const tensor &dresidual, const tensor &dx,
                               const tensor &dweight, const tensor &dbias,
                               const pydet_layernorm_backward_options *options = nullptr) {
  call(pydet_layernorm_backward, stream, dy.describe(), x.describe(), weight.describe(), mean.describe(),
       rstd.describe(), dresidual.describe(), dx.describe(), dweight.describe(), dbias.describe(), options);
}
inline void sample(void *stream, const tensor &x, const tensor &seed, const tensor &position, const tensor &token,
                   const tensor &log_prob, const tensor &filtered_log_prob,
                   const pydet_sample_options *options = nullptr) {
  call(pydet_sample, stream, x.describe(), seed.describe(), position.describe(), token.describe(), log_prob.describe(),
       filtered_log_prob.describe(), options);
}
inline void linear_log_prob(void *stream, const tensor &x, const tensor &w, const tensor &bias, const tensor &index,
                            const tensor &log_prob, const pydet_linear_log_prob_options *options = nullptr) {
  call(pydet_linear_log_prob, stream, x.describe(), w.describe(), bias.describe(), index.describe(),
       log_prob.describe(), options);
}
inline void linear_log_prob_backward(void *stream, const tensor &dlog_prob, const tensor &x, const tensor &w,
                                     const tensor &bias, const tensor &index, const tensor &log_prob, const tensor &dx,
                                     const tensor &dw, const tensor &dbias,
                                     const pydet_linear_log_prob_options *options = nullptr) {
  call(pydet_linear_log_prob_backward, stream, dlog_prob.describe(), x.describe(), w.describe(), bias.describe(),
       index.describe(), log_prob.describe(), dx.describe(), dw.describe(), dbias.describe(), options);
}
inline void linear_cross_entropy(void *stream, const tensor &x, const tensor &w, const tensor &bias,
                                 const tensor &target, const tensor &loss,
                                 const pydet_linear_cross_entropy_options *options = nullptr) {
  call(pydet_linear_cross_entropy, stream, x.describe(), w.describe(), bias.describe(), target.describe(),
       loss.describe(), options);
}
inline void linear_cross_entropy_backward(void *stream, const tensor &dloss, const tensor &x, const tensor &w,
                                          const tensor &bias, const tensor &target, const tensor &loss,
                                          const tensor &dx, const tensor &dw, const tensor &dbias,
                                          const pydet_linear_cross_entropy_options *options = nullptr) {
  call(pydet_linear_cross_entropy_backward, stream, dloss.describe(), x.describe(), w.describe(), bias.describe(),
       target.describe(), loss.describe(), dx.describe(), dw.describe(), dbias.describe(), options);
}
inline void topk(void *stream, const tensor &x, const tensor &values, const tensor &index,
                 const pydet_topk_options *options = nullptr) {
  call(pydet_topk, stream, x.describe(), values.describe(), index.describe(), options);
}
inline void embedding(void *stream, const tensor &w, const tensor &ids, const tensor &out,
                      const pydet_embedding_options *options = nullptr) {
  call(pydet_embedding, stream, w.describe(), ids.describe(), out.describe(), options);
}
inline void embedding_backward(void *stream, const tensor &dout, const tensor &ids, const tensor &dw,
                               const pydet_embedding_backward_options *options = nullptr) {
  call(pydet_embedding_backward, stream, dout.describe(), ids.describe(), dw.describe(), options);
}
inline void rotary_table(void *stream, const tensor &positions, const tensor &frequencies, const tensor &cos,
                         const tensor &sin, const pydet_rotary_table_options *options = nullptr) {
  call(pydet_rotary_table, stream, positions.describe(), frequencies.describe(), cos.describe(), sin.describe(),
       options);
}
inline void rotary(void *stream, const tensor &q, const tensor &k, const tensor &cos, const tensor &sin,
                   const tensor &q_out, const tensor &k_out, const pydet_rotary_options *options = nullptr) {
  call(pydet_rotary, stream, q.describe(), k.describe(), cos.describe(), sin.describe(), q_out.describe(),
       k_out.describe(), options);
}
inline void activation(void *stream, const tensor &x, const tensor &up, const tensor &y,
                       const pydet_activation_options *options = nullptr) {
  call(pydet_activation, stream, x.describe(), up.describe(), y.describe(), options);
}
inline void activation_backward(void *stream, const tensor &dy, const tensor &x, const tensor &up, const tensor &dx,
                                const tensor &dup, const pydet_activation_options *options = nullptr) {
  call(pydet_activation_backward, stream, dy.describe(), x.describe(), up.describe(), dx.describe(), dup.describe(),
       options);
}
// Of the tensors that options point to, `describe()` gives the descriptors.
inline void attention(void *stream, const tensor &q, const tensor &k, const tensor &v, const tensor &out,
                      const tensor &lse, const pydet_attention_options *options = nullptr) {
  call(pydet_attention, stream, q.describe(), k.describe(), v.describe(), out.describe(), lse.describe(), options);
}

inline void attention_backward(void *stream, const tensor &dout, const tensor &q, const tensor &k, const tensor &v,
                               const tensor &out, const tensor &lse, const tensor &dq, const tensor &dk,
                               const tensor &dv, const pydet_attention_backward_options *options = nullptr) {
  call(pydet_attention_backward, stream, dout.describe(), q.describe(), k.describe(), v.describe(), out.describe(),
       lse.describe(), dq.describe(), dk.describe(), dv.describe(), options);
}

// Bytes of workspace, as pydet.h says.
inline uint64_t attention_workspace(int64_t sequences, int64_t heads, int64_t groups, int64_t queries, int64_t keys,
                                    int64_t d, int64_t e, const pydet_attention_options *options = nullptr) {
  uint64_t bytes = 0;
  call(pydet_attention_workspace, sequences, heads, groups, queries, keys, d, e, options, &bytes);
  return bytes;
}
inline uint64_t attention_backward_workspace(int64_t sequences, int64_t heads, int64_t groups, int64_t queries,
                                             int64_t keys, int64_t d, int64_t e,
                                             const pydet_attention_backward_options *options = nullptr) {
  uint64_t bytes = 0;
  call(pydet_attention_backward_workspace, sequences, heads, groups, queries, keys, d, e, options, &bytes);
  return bytes;
}
inline uint64_t linear_log_prob_workspace(int64_t rows, int64_t n, int64_t k, pydet_dtype type, bool backward,
                                          uint64_t most = 0, const pydet_linear_log_prob_options *options = nullptr) {
  uint64_t bytes = 0;
  call(pydet_linear_log_prob_workspace, rows, n, k, type, int32_t(backward), most, options, &bytes);
  return bytes;
}
inline uint64_t linear_cross_entropy_workspace(int64_t rows, int64_t n, int64_t k, pydet_dtype type, bool backward,
                                               uint64_t most = 0,
                                               const pydet_linear_cross_entropy_options *options = nullptr) {
  uint64_t bytes = 0;
  call(pydet_linear_cross_entropy_workspace, rows, n, k, type, int32_t(backward), most, options, &bytes);
  return bytes;
}
inline uint64_t gemm_workspace(int64_t batch, int64_t m, int64_t n, int64_t k,
                               const pydet_gemm_options *options = nullptr) {
  uint64_t bytes = 0;
  call(pydet_gemm_workspace, batch, m, n, k, options, &bytes);
  return bytes;
}
inline uint64_t gemm_copy_workspace(const tensor &operand) {
  uint64_t bytes = 0;
  call(pydet_gemm_copy_workspace, operand.describe(), &bytes);
  return bytes;
}
inline uint64_t skinny_gemm_workspace(int64_t m, int64_t n, int64_t k,
                                      const pydet_skinny_gemm_options *options = nullptr) {
  uint64_t bytes = 0;
  call(pydet_skinny_gemm_workspace, m, n, k, options, &bytes);
  return bytes;
}
inline uint64_t scaled_gemm_workspace(int64_t batch, int64_t m, int64_t n, int64_t k,
                                      const pydet_scaled_gemm_options *options = nullptr) {
  uint64_t bytes = 0;
  call(pydet_scaled_gemm_workspace, batch, m, n, k, options, &bytes);
  return bytes;
}
inline uint64_t embedding_backward_workspace(int64_t tokens, int64_t rows) {
  uint64_t bytes = 0;
  call(pydet_embedding_backward_workspace, tokens, rows, &bytes);
  return bytes;
}
inline uint64_t rmsnorm_backward_workspace(int64_t rows, int64_t n) {
  uint64_t bytes = 0;
  call(pydet_rmsnorm_backward_workspace, rows, n, &bytes);
  return bytes;
}
inline uint64_t layernorm_backward_workspace(int64_t rows, int64_t n) {
  uint64_t bytes = 0;
  call(pydet_layernorm_backward_workspace, rows, n, &bytes);
  return bytes;
}

// GPUs (or 1, the CPU) that the library can use.
inline int32_t device_count(int32_t device_type) {
  int32_t count = 0;
  call(pydet_device_count, device_type, &count);
  return count;
}

}  // namespace pydet

#endif  // PYDET_HPP
