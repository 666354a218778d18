/* The promise in C: a row computed alone has the bits it has in the batch. Compiles as C99 and as C++11. */
#include <pydet.h>
#include <stdio.h>
#include <string.h>

enum { M = 5, N = 7, K = 300 };

static pydet_tensor matrix(float *data, int64_t *shape) {
  pydet_tensor t = {data, {PYDET_CPU, 0}, 2, {PYDET_FLOAT, 32, 1}, shape, NULL, 0};
  return t;
}

int main(void) {
  static float a[M * K], b[K * N], c[M * N], row[N];
  int64_t a_shape[] = {M, K}, b_shape[] = {K, N}, c_shape[] = {M, N}, m, i;
  pydet_tensor A = matrix(a, a_shape), B = matrix(b, b_shape), C = matrix(c, c_shape);
  for (i = 0; i < M * K; ++i) a[i] = (float)(i * 7919 % 1009) / 1009 - 0.5f;
  for (i = 0; i < K * N; ++i) b[i] = (float)(i * 6101 % 997) / 997 - 0.5f;
  if (pydet_gemm(NULL, &A, &B, NULL, &C, NULL) != PYDET_OK) return puts(pydet_last_error()), 1;
  a_shape[0] = c_shape[0] = 1; /* now one row at a time */
  for (m = 0; m < M; ++m) {
    A.data = a + m * K;
    C.data = row;
    if (pydet_gemm(NULL, &A, &B, NULL, &C, NULL) != PYDET_OK) return puts(pydet_last_error()), 1;
    if (memcmp(row, c + m * N, sizeof row) != 0) return puts("a row alone differs from the batch"), 1;
  }
  printf("pydet %s, %s: every row alone has the bits it has in the batch\n", pydet_version(), pydet_last_kernel());
  return 0;
}
