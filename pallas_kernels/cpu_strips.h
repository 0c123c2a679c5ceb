// Products of small matrices whose sums are in registers: of a few rows and a strip of columns.

#pragma once

#include "cpu_registers.h"

constexpr int kTall = 6, kWide = kRegisters == 32 ? 4 : 2;
constexpr int64_t kColumns = kWide * kWidth;

static inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// y[m, i] = keep * y[m, i] + sum over k < count of weights[m, k] * rows[k, i], for i in D registers and M rows y.
// Neighbouring k of the weights are `step` apart. With a `keep` of 0 it does not matter what y was.
template <int M, int D>
static void multiply(const float* weights, int64_t weights_row, int64_t step, const float* rows, int64_t row,
                     int64_t count, float keep, float* y, int64_t y_row) {
  Reg sums[M][D];
  for (int m = 0; m < M; m++)
    for (int i = 0; i < D; i++) sums[m][i] = keep == 0 ? Reg{} : reg(y + m * y_row + i * kWidth) * keep;
  for (int64_t k = 0; k < count; k++, rows += row, weights += step) {
    Reg right[D];
    for (int i = 0; i < D; i++) right[i] = kept(reg(rows + i * kWidth));
    for (int m = 0; m < M; m++)
      for (int i = 0; i < D; i++) sums[m][i] = fused(right[i], weights[m * weights_row] - Floats{}, sums[m][i]);
  }
  for (int m = 0; m < M; m++)
    for (int i = 0; i < D; i++) reg(y + m * y_row + i * kWidth) = sums[m][i];
}

// The same for up to M rows y, in D registers.
template <int D, int M = kTall>
static void multiply_strip(int64_t height, const float* weights, int64_t weights_row, int64_t step, const float* rows,
                           int64_t row, int64_t count, float keep, float* y, int64_t y_row) {
  if constexpr (M > 1)
    if (height < M)
      return multiply_strip<D, M - 1>(height, weights, weights_row, step, rows, row, count, keep, y, y_row);
  multiply<M, D>(weights, weights_row, step, rows, row, count, keep, y, y_row);
}
