// The common part of the CPU's matmuls: vectors, and products with a transposed panel of a weight, in float32.
//
// Results do not depend on the division of work among threads: the order of each sum is fixed.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "cpu_threads.h"

constexpr int kLanes = 8;
typedef float Vec __attribute__((vector_size(4 * kLanes), aligned(4)));

static inline Vec& at(float* p) { return *reinterpret_cast<Vec*>(p); }
static inline const Vec& at(const float* p) { return *reinterpret_cast<const Vec*>(p); }

static inline float sum(Vec v) {
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
  return v[0] + v[1];
}

// Sums of four vectors, in the same order as the sum of one.
typedef float Four __attribute__((vector_size(16), aligned(4)));
static inline Four sum(Vec a, Vec b, Vec c, Vec d) {
  const auto halves = [](Vec v) {
    return __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
  };
  const auto pairs = [](Four v, Four w) {
    return __builtin_shufflevector(v, w, 0, 1, 4, 5) + __builtin_shufflevector(v, w, 2, 3, 6, 7);
  };
  const Four ab = pairs(halves(a), halves(b)), cd = pairs(halves(c), halves(d));
  return __builtin_shufflevector(ab, cd, 0, 2, 4, 6) + __builtin_shufflevector(ab, cd, 1, 3, 5, 7);
}

// exp(x) for x <= 0, to about 2 units in the last place: 2^round(x / ln 2) times a polynomial of the rest.
static inline Vec exponential(Vec x) {
  typedef int32_t Int __attribute__((vector_size(4 * kLanes)));
  x = x < -87.f ? Vec{} - 87.f : x;
  Vec n = x * 1.44269504f + 12582912.f;  // the addend leaves no bits for a fraction
  Int power = ((Int)n << 23) + (127 << 23);
  n -= 12582912.f;
  Vec r = x - n * 0.693145752f - n * 1.42860677e-6f;
  Vec p = 1.f + r * (1.f + r * (0.5f + r * (0.166666657f + r * (0.0416664854f + r * (0.00833345205f + r * 0.00139350991f)))));
  return p * (Vec)power;
}

// Prefetches 32 floats to the second-level cache. A small batch is limited by reading its weights. So the next rows of
// w are prefetched while the current ones are multiplied, a part of them in each pass.
static inline void prefetch(const float* p) {
  __builtin_prefetch(p, 0, 2);
  __builtin_prefetch(p + 16, 0, 2);
}

// Keeps v in a register. GCC would load it again at each use, and loads are the scarcest resource of a tile.
static inline void hold(Vec& v) {
#ifdef __AVX__
  asm("" : "+x"(v));
#endif
}

// y[m, n] = x[m] . w[n] for M rows x [in], contiguous, and N rows w [in], `row` apart. All sums are in registers,
// beside the vectors of the shorter side and one vector of the other. Prefetches from `next` on, `stride` for each
// kLanes of in.
template <int M, int N>
static void tile(const float* x, const float* w, float* y, int64_t in, int64_t row, int64_t out, const float* next,
                 int64_t stride) {
  constexpr bool wide = M < N;
  constexpr int kHeld = wide ? M : N, kPassing = wide ? N : M;
  const float *held = wide ? x : w, *passing = wide ? w : x;
  const int64_t held_row = wide ? in : row, passing_row = wide ? row : in;
  Vec sums[kPassing][kHeld];
  for (auto& some : sums)
    for (Vec& sum : some) sum = Vec{};
  int64_t k = 0;
  for (; k + kLanes <= in; k += kLanes, next += stride) {
    prefetch(next);
    Vec left[kHeld];
    for (int i = 0; i < kHeld; i++) hold(left[i] = at(held + i * held_row + k));
    for (int j = 0; j < kPassing; j++) {
      Vec right = at(passing + j * passing_row + k);
      if (kHeld > 1) hold(right);
      for (int i = 0; i < kHeld; i++) sums[j][i] += left[i] * right;
    }
  }
  for (int i = 0; i < kHeld; i++) {
    float totals[kPassing];
    if constexpr (kPassing == 4)
      reinterpret_cast<Four&>(totals) = sum(sums[0][i], sums[1][i], sums[2][i], sums[3][i]);
    else
      for (int j = 0; j < kPassing; j++) totals[j] = sum(sums[j][i]);
    for (int j = 0; j < kPassing; j++) {
      for (int64_t end = k; end < in; end++) totals[j] += held[i * held_row + end] * passing[j * passing_row + end];
      y[wide ? i * out + j : j * out + i] = totals[j];
    }
  }
}

// `tile` for any number of rows x, in passes of nearly equal height. Prefetches N rows from `next` on.
template <int N>
static void dot(const float* x, const float* w, float* y, int64_t rows, int64_t in, int64_t row, int64_t out,
                const float* next) {
  constexpr int tall = N == 3 ? 4 : 3;
  constexpr decltype(&tile<1, N>) of_height[] = {tile<1, N>, tile<2, N>, tile<3, N>, tile<tall, N>};
  const int64_t passes = (rows + tall - 1) / tall, share = N * row / passes, stride = N * kLanes / passes;
  for (int64_t left = passes, m = 0; left; left--, next += share) {
    const int64_t height = (rows - m) / left;
    of_height[height - 1](x + m * in, w, y + m * out, in, row, out, next, stride);
    m += height;
  }
}

// For many rows x, w is transposed first: then no sums over lanes are needed, and a tile loads w twice for twelve sums.

constexpr int kPanel = 2 * kLanes, kTall = 6;

// to[k, n] = a[n][k] for a block of kLanes x kLanes; rows of `to` are `row` apart.
static inline void transpose_block(Vec* a, float* to, int64_t row) {
  Vec b[kLanes];
  for (int i = 0; i < kLanes; i += 2) {
    b[i] = __builtin_shufflevector(a[i], a[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
    b[i + 1] = __builtin_shufflevector(a[i], a[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
  for (int i = 0; i < kLanes; i++)
    a[i] = i & 2 ? __builtin_shufflevector(b[i - 2], b[i], 2, 3, 10, 11, 6, 7, 14, 15)
                 : __builtin_shufflevector(b[i], b[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
  for (int i = 0; i < kLanes; i++)
    at(to + i * row) = i & 4 ? __builtin_shufflevector(a[i - 4], a[i], 4, 5, 6, 7, 12, 13, 14, 15)
                             : __builtin_shufflevector(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
}

template <int M>
static void multiply(const float* x, const float* panel, float* y, int64_t in, int64_t out, const float* next,
                     int64_t stride) {
  Vec sums[M][2] = {};
  for (int64_t k = 0; k < in; k++, next += stride) {
    __builtin_prefetch(next, 0, 2);
    Vec right[2] = {at(panel + k * kPanel), at(panel + k * kPanel + kLanes)};
    hold(right[0]), hold(right[1]);
    for (int m = 0; m < M; m++)
      for (int n = 0; n < 2; n++) sums[m][n] += x[m * in + k] * right[n];
  }
  for (int m = 0; m < M; m++)
    for (int n = 0; n < 2; n++) at(y + m * out + n * kLanes) = sums[m][n];
}

static void transpose(const float* w, int64_t in, int64_t row, float* panel) {
  int64_t k = 0;
  for (; k + kLanes <= in; k += kLanes)
    for (int n = 0; n < kPanel; n += kLanes) {
      Vec block[kLanes];
      for (int i = 0; i < kLanes; i++) block[i] = at(w + (n + i) * row + k);
      transpose_block(block, panel + k * kPanel + n, kPanel);
    }
  for (; k < in; k++)
    for (int n = 0; n < kPanel; n++) panel[k * kPanel + n] = w[n * row + k];
}

// y[m, n] = x[m] . w[n] for many rows x and kPanel rows w.
static void many_rows(const float* x, const float* w, float* y, int64_t rows, int64_t in, int64_t row, int64_t out,
                      const float* next) {
  constexpr decltype(&multiply<1>) of_height[] = {multiply<1>, multiply<2>, multiply<3>, multiply<4>, multiply<5>, multiply<6>};
  static thread_local std::vector<float> panel;
  panel.resize(in * kPanel);
  transpose(w, in, row, panel.data());
  const int64_t passes = (rows + kTall - 1) / kTall, stride = std::max<int64_t>(kPanel / passes, 1);
  for (int64_t left = passes, m = 0; left; left--, next += stride * in) {
    const int64_t height = (rows - m) / left;
    of_height[height - 1](x + m * in, panel.data(), y + m * out, in, out, next, stride);
    m += height;
  }
}

constexpr int64_t kPiece = 48;  // outputs of a thread's piece; a multiple of the outputs of tiles and panels

// y[m, n] = x[m] . w[n] for `rows` rows x and `size` rows w. From `many` rows x on it uses panels. Prefetches the rows
// that follow, or rows from `next` on.
static void multiply_rows(const float* x, const float* w, float* y, int64_t rows, int64_t size, int64_t in, int64_t row,
                          int64_t out, int64_t many, const float* next = nullptr) {
  int64_t n = 0;
  const auto pass = [&](auto multiply, int64_t wide) {
    for (; n + wide <= size; n += wide)
      multiply(x, w + n * row, y + n, rows, in, row, out, next ? next + n * row : w + (n + wide) * row);
  };
  if (rows >= many) pass(many_rows, kPanel);
  if ((rows + 3) / 4 < (rows + 2) / 3)  // tiles of 4 x 3 need fewer passes than 3 x 4
    pass(dot<3>, 3);
  else if (rows > 1)
    pass(dot<4>, 4);
  pass(dot<1>, 1);
}
