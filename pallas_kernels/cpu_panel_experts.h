// A mixture of experts with weights in panels: for each token, the weighted sum of its experts' gated MLPs.
//
// There is a row for each token and expert. Rows are sorted by expert, so that the weights of an expert are read once
// for all its rows, and weights of experts without rows are not read. Tokens that do not matter have no rows.

#pragma once

#include <numeric>

#include "cpu_panel_product.h"

enum Activation : int64_t { kSilu, kGelu, kGeluTanh, kClamped };  // see `cpu_panels.py`

struct Experts {
  int64_t tokens, top_k, count, rows = 0;
  std::vector<int32_t> first;  // [count + 1], each expert's first row
  std::vector<int32_t> pair;  // [rows], the row's index in `chosen`: token * top_k + number
  std::vector<int32_t> busy;   // experts that have rows

  // For rows that are sorted already: expert e has sizes[e] rows.
  Experts(const int32_t* sizes, int64_t count) : tokens(0), top_k(1), count(count), first(count + 1) {
    std::partial_sum(sizes, sizes + count, first.begin() + 1);
    for (int64_t e = 0; e < count; e++)
      if (sizes[e]) busy.push_back(e);
    rows = first[count];
  }

  Experts(const int32_t* chosen, int64_t tokens, int64_t top_k, int64_t count)
      : tokens(tokens), top_k(top_k), count(count), first(count + 1) {
    const auto is_one = [=](int32_t expert) { return expert >= 0 && expert < count; };
    for (int64_t i = 0; i < tokens * top_k; i++)
      if (is_one(chosen[i])) first[chosen[i] + 1]++, rows++;
    for (int64_t e = 0; e < count; e++)
      if (first[e + 1]) busy.push_back(e);
    std::partial_sum(first.begin(), first.end(), first.begin());
    pair.resize(rows);
    std::vector<int32_t> next(first.begin(), first.end() - 1);
    for (int64_t i = 0; i < tokens * top_k; i++)
      if (is_one(chosen[i])) pair[next[chosen[i]]++] = i;
  }
};

// y [rows, out] = each row of x [rows, in] times the weight of its expert in the stack w. `rounded` has the rows in
// their rounded forms; x may be null where no other form is multiplied.
static void multiply_by_expert(const Call& call, const Experts& experts, const Panels& w, int64_t arithmetic,
                               const float* x, const Rounded& rounded, float* y) {
  const int64_t busy = experts.busy.size(), panels = w.count(), piece = panels_at_once(call, busy * panels);
  const int64_t pieces = (panels + piece - 1) / piece;
  parallel_for(call, busy * pieces, [&](int64_t i) {
    const int64_t expert = experts.busy[i / pieces], first = experts.first[expert], at = i % pieces * piece;
    const int64_t own = experts.first[expert + 1] - first;
    const Product product{x ? x + first * w.in : x, own, w.of(expert), rounded, first, arithmetic, y + first * w.out};
    product.run_all(at, std::min(panels, at + piece));
  });
}

// y = each row of x [rows, in] times the transposed weight of its expert, of a stack in panels [experts, out, in]. x is
// sorted by expert; expert e has sizes[e] rows. Rows of y beyond all experts' rows become zeros.
static void panel_grouped_matmul(const Call& call) {
  const Array &x = call.argument(0), &sizes = call.argument(3);
  const int64_t in = x.dims[1], out = call.result().dims[1];
  if (kChecked) check_sizes(data<int32_t>(sizes), sizes.dims[0], x.dims[0]);
  const Experts experts(data<int32_t>(sizes), sizes.dims[0]);
  const float* xs = data<float>(x);
  float* y = data<float>(call.result());
  const Panels w(call, 1, out, in, sizes.dims[0]);
  const int64_t arithmetic = call.attribute<int64_t>("arithmetic");
  Rounded rounded;
  round_rows(call, Forms(w, arithmetic), in, experts.rows, rounded, [=](int64_t row) { return xs + row * in; });
  multiply_by_expert(call, experts, w, arithmetic, xs, rounded, y);
  std::fill(y + experts.rows * out, y + x.dims[0] * out, 0.f);
}
DEFINE_HANDLER(PanelGroupedMatmul, panel_grouped_matmul, kF32, XLA_FFI_DataType_U8, kS32, kS32)

// to[j] = activation of the pairs (gate, up) [size, 2]. If `bias` is not null, it is added to the pairs first.
static void gate_row(const float* from, const float* bias, int64_t size, int64_t activation, float limit, float* to) {
  const auto gated = [activation, limit](Vec gate, Vec up) {
    Vec factor = gate;
    if (activation == kClamped) {
      const Vec most = Vec{} + limit;
      gate = gate < most ? gate : most;
      up = up < most ? up : most, up = (up > -most ? up : -most) + 1;
      factor = gate * 1.702f;
    }
    if (activation == kSilu || activation == kClamped) {
      const Vec e = exponential(factor > 0 ? -factor : factor);
      return (factor > 0 ? gate : gate * e) / (1 + e) * up;
    }
    for (int j = 0; j < kLanes; j++) {
      const float a = gate[j];
      gate[j] = activation == kGelu ? 0.5f * a * (1 + std::erf(a * 0.70710678f))
                                    : 0.5f * a * (1 + std::tanh(0.79788456f * (a + 0.044715f * a * a * a)));
    }
    return gate * up;
  };
  for (int64_t i = 0; i < size; i += kLanes) {
    const int64_t some = std::min<int64_t>(kLanes, size - i);
    Vec low = {}, high = {};
    if (some == kLanes) {
      low = at(from + 2 * i), high = at(from + 2 * i + kLanes);
      if (bias) low += at(bias + 2 * i), high += at(bias + 2 * i + kLanes);
    } else {
      float pairs[2 * kLanes] = {};
      for (int64_t j = 0; j < 2 * some; j++) pairs[j] = from[2 * i + j] + (bias ? bias[2 * i + j] : 0);
      low = at(pairs), high = at(pairs + kLanes);
    }
    const Vec made = gated(__builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14),
                           __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15));
    std::memcpy(to + i, &made, some * sizeof(float));
  }
}

static std::unique_ptr<float[]> scratch(int64_t size) { return std::unique_ptr<float[]>(new float[size]); }

// Writes the forms of the experts' rows of x [tokens, in] to `rounded`, and returns them as floats, or null where no
// product needs these: then tokens are rounded once for all of their experts. If `weights` [tokens, top_k] is not null,
// it multiplies the rows.
static std::unique_ptr<float[]> rows_of_tokens(const Call& call, const Experts& experts, const float* x,
                                               const float* weights, int64_t in, const Forms& forms, Rounded& rounded) {
  if (!weights && !forms.floats) {
    Rounded of_tokens;
    round_rows(call, forms, in, experts.tokens, of_tokens, [=](int64_t token) { return x + token * in; });
    rounded.reserve(experts.rows, in, forms.pairs, forms.codes);
    parallel_for(call, experts.rows,
                 [&](int64_t row) { rounded.copy(of_tokens, experts.pair[row] / experts.top_k, row); });
    return nullptr;
  }
  auto inputs = scratch(experts.rows * in);
  parallel_for(call, experts.rows, [&](int64_t row) {
    const int64_t pair = experts.pair[row];
    const float *from = x + pair / experts.top_k * in, factor = weights ? weights[pair] : 1;
    float* to = inputs.get() + row * in;
    for (int64_t k = 0; k < in; k++) to[k] = from[k] * factor;
  });
  round_rows(call, forms, in, experts.rows, rounded, [&](int64_t row) { return inputs.get() + row * in; });
  return inputs;
}

// y [tokens, out], with zeros for tokens beyond `count`. Arguments: x [tokens, in], chosen and weights [tokens, top_k],
// panels of gate_up [experts, 2 * size, in] and of down [experts, out, size], biases of gate_up [experts, 2 * size] or
// an empty array, count.
static void panel_experts(const Call& call) {
  const Array &x = call.argument(0), &chosen = call.argument(1), &biases = call.argument(7);
  const int64_t in = x.dims[1], size = call.attribute<int64_t>("size"), out = call.result().dims[1];
  const int64_t activation = call.attribute<int64_t>("activation"), top_k = chosen.dims[1];
  const bool weighs_inputs = call.attribute<int64_t>("weighs_inputs");
  const float limit = call.attribute<float>("limit");
  const int64_t tokens = std::max<int64_t>(call.leading(8, x.dims[0]), 0);
  const float *xs = data<float>(x), *weights = data<float>(call.argument(2));
  const float* bias = element_count(biases) ? data<float>(biases) : nullptr;
  float* y = data<float>(call.result());
  std::fill(y, y + x.dims[0] * out, 0.f);
  const Experts experts(data<int32_t>(chosen), tokens, top_k, call.attribute<int64_t>("experts"));
  if (!experts.rows) return;
  const Panels first(call, 3, 2 * size, in, experts.count), second(call, 5, out, size, experts.count);
  const int64_t first_arithmetic = call.attribute<int64_t>("first"), arithmetic = call.attribute<int64_t>("second");
  Rounded rounded, rounded_gated;
  const auto inputs = rows_of_tokens(call, experts, xs, weighs_inputs ? weights : nullptr, in,
                                     Forms(first, first_arithmetic), rounded);
  const auto hidden = scratch(experts.rows * 2 * size), gated = scratch(experts.rows * size);
  multiply_by_expert(call, experts, first, first_arithmetic, inputs.get(), rounded, hidden.get());
  parallel_for(call, experts.rows, [&](int64_t row) {
    const auto after = std::upper_bound(experts.first.begin(), experts.first.end(), row);
    const int64_t expert = after - experts.first.begin() - 1;
    gate_row(hidden.get() + row * 2 * size, bias ? bias + expert * 2 * size : nullptr, size, activation, limit,
             gated.get() + row * size);
  });
  const auto made = scratch(experts.rows * out);
  round_rows(call, Forms(second, arithmetic), size, experts.rows, rounded_gated,
             [&](int64_t row) { return gated.get() + row * size; });
  multiply_by_expert(call, experts, second, arithmetic, gated.get(), rounded_gated, made.get());
  std::vector<int32_t> place(tokens * top_k, -1);
  for (int64_t row = 0; row < experts.rows; row++) place[experts.pair[row]] = row;
  parallel_for(call, tokens, [&](int64_t token) {
    for (int64_t i = token * top_k; i < (token + 1) * top_k; i++) {
      if (place[i] < 0) continue;
      const float *from = made.get() + place[i] * out, factor = weighs_inputs ? 1 : weights[i];
      for (int64_t k = 0; k < out; k++) y[token * out + k] += from[k] * factor;
    }
  });
}
DEFINE_HANDLER(PanelExperts, panel_experts, kF32, kS32, kF32, XLA_FFI_DataType_U8, kS32, XLA_FFI_DataType_U8, kS32, kF32,
               kS32)
