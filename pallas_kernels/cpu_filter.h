// Top-k, top-p and min-p of a row of logits. See jaxserve/execution/filters.py for their meaning.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu_kernels.h"

// The bits of a float, in an order in which larger numbers have larger bits.
static inline uint32_t order_of(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The largest of the numbers from [size] such that the weights of all numbers from there up reach `least`: the smallest
// number if even all do not. Weights of numbers below `bottom` do not count. They are added in double: first by the
// highest bits of their numbers, in the order of the row, then one by one from the largest number down.
static float reaching(const float* from, const float* weights, int64_t size, float bottom, double least) {
  constexpr int kShift = 20, kBins = 1 << (32 - kShift);
  static thread_local std::vector<double> bins;
  static thread_local std::vector<std::pair<float, float>> some;
  bins.assign(kBins, 0);
  for (int64_t i = 0; i < size; i++)
    if (from[i] >= bottom) bins[order_of(from[i]) >> kShift] += weights ? weights[i] : 1;
  double sum = 0;
  int64_t bin = kBins - 1;
  for (; bin > 0 && sum + bins[bin] < least; bin--) sum += bins[bin];
  some.clear();
  for (int64_t i = 0; i < size; i++)
    if (from[i] >= bottom && order_of(from[i]) >> kShift == bin) some.push_back({from[i], weights ? weights[i] : 1});
  std::stable_sort(some.begin(), some.end(), [](auto a, auto b) { return a.first > b.first; });
  for (const auto& [number, weight] : some)
    if ((sum += weight) >= least) return number;
  return bottom;
}

// y = x [size], where tokens that are dropped become `excluded`. top_k 0 and top_p 1 drop none.
static void filter_row(const float* x, int64_t size, int32_t top_k, float top_p, float min_p, float excluded, float* y) {
  const float top = *std::max_element(x, x + size);
  static thread_local std::vector<float> weights;
  weights.resize(size);
  for (int64_t i = 0; i < size; i += kLanes) {
    float some[kLanes];
    const int64_t count = std::min<int64_t>(kLanes, size - i);
    std::fill(std::copy_n(x + i, count, some), some + kLanes, top);
    const Vec weight = exponential(at(some) - top);
    std::memcpy(weights.data() + i, &weight, count * sizeof(float));
  }
  float bottom = -INFINITY;
  if (top_k > 0 && top_k < size) bottom = reaching(x, nullptr, size, bottom, top_k);
  if (top_p < 1) {
    double total = 0;
    for (int64_t i = 0; i < size; i++) total += x[i] >= bottom ? weights[i] : 0;
    bottom = std::min(top, reaching(x, weights.data(), size, bottom, top_p * total));
  }
  for (int64_t i = 0; i < size; i++) y[i] = x[i] >= bottom && weights[i] >= min_p ? x[i] : excluded;
}
