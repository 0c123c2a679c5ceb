// What LoRA adapters add to a product: for each token, y += (x A^T) B with the matrices of its own adapter. x and y are
// float32, the matrices float32 or bfloat16.
//
// Tokens are sorted by adapter, so that each matrix is read once. Parts that an adapter does not change, and rows of the
// matrices beyond its rank, are not read. The order of each sum is fixed, so a token's results do not depend on others.

#pragma once

#include <vector>

#include "cpu_threads.h"
#include "cpu_vectors.h"

// Two vectors of numbers [2 * kWidth]. A format may arrange them in another order, in which all others then are, too.
struct Two {
  Floats first, second;
};
static inline Floats add_two(Floats sum, Two left, Two right) {
  return fused(left.second, right.second, fused(left.first, right.first, sum));
}
template <size_t... I>
static inline Two apart(Two v, std::index_sequence<I...>) {  // numbers at even places, and at odd ones
  return {__builtin_shufflevector(v.first, v.second, static_cast<int>(2 * I)...),
          __builtin_shufflevector(v.first, v.second, static_cast<int>(2 * I + 1)...)};
}
template <size_t... I>
static inline Two together(Two v, std::index_sequence<I...>) {
  return {__builtin_shufflevector(v.first, v.second, static_cast<int>(I / 2 + I % 2 * kWidth)...),
          __builtin_shufflevector(v.first, v.second, static_cast<int>(kWidth / 2 + I / 2 + I % 2 * kWidth)...)};
}

// Formats of the matrices' numbers, and of x where it is multiplied with A. add: sum += left * 2 * kWidth numbers of a row
// of A. factors: what the rows of B are multiplied with; where parts alternate, it is a pair
// of numbers for each pair of outputs.
struct Full {
  typedef float Number;
  static inline Two widen(const float* from) { return {load<Floats>(from), load<Floats>(from + kWidth)}; }
  static inline Two arrange(Two v) { return v; }
  static inline Two restore(Two v) { return v; }
  template <bool kAlternate>
  static inline Two factors(const float* low) {
    typedef double Doubles __attribute__((vector_size(4 * kWidth)));
    const Floats both = kAlternate ? (Floats)(load<double>(low) - Doubles{}) : *low - Floats{};
    return {both, both};
  }
  static inline float one(float x) { return x; }
  typedef float Input;
  typedef Two Left;
  static inline Left left(const float* x, int64_t k) { return widen(x + k); }
  static inline float input(const float* x, int64_t k) { return x[k]; }
  static inline Floats add(Floats sum, Left left, const float* row) { return add_two(sum, left, widen(row)); }
};
struct Half {  // bfloat16, which lie in pairs in the lanes of a vector
  typedef uint16_t Number;
  static inline Two widen(const uint16_t* from) {
    const Ints both = kept(load<Ints>(from));
    return {(Floats)(both << 16), (Floats)(both & -65536)};
  }
  static inline Two arrange(Two v) { return apart(v, Lanes()); }
  static inline Two restore(Two v) { return together(v, Lanes()); }
  template <bool kAlternate>
  static inline Two factors(const float* low) {
    return {low[0] - Floats{}, low[kAlternate] - Floats{}};
  }
  static inline float one(uint16_t x) { return __builtin_bit_cast(float, static_cast<uint32_t>(x) << 16); }
  typedef float Input;
  typedef Two Left;
  static inline Left left(const float* x, int64_t k) { return arrange(Full::widen(x + k)); }
  static inline float input(const float* x, int64_t k) { return x[k]; }
  static inline Floats add(Floats sum, Left left, const uint16_t* row) { return add_two(sum, left, widen(row)); }
};
#if defined(__AVX512BF16__) && CPU_WIDTH == 16
#define HAS_PAIRS
struct Paired : Half {  // x is rounded to pairs of bfloat16, too
  typedef int32_t Input;
  typedef __m512i Left;
  static inline Left left(const int32_t* x, int64_t k) { return load<__m512i>(x + k / 2); }
  static inline float input(const int32_t* x, int64_t k) { return one(reinterpret_cast<const uint16_t*>(x)[k]); }
  static inline Floats add(Floats sum, Left left, const uint16_t* row) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)load<__m512i>(row), (__m512bh)left);
  }
};
#endif

constexpr int kSums = kRegisters / 2;  // vectors of sums in a tile
constexpr int kMostTokens = 4, kMostRows = 8;  // of a tile
constexpr int64_t kOutputs = 512;      // of a piece of the work with B
constexpr int64_t kSlice = 256;        // outputs of a token that is alone, between prefetches of the next one's B
constexpr int64_t kWork = 1 << 15;     // multiplications for which another thread pays

// The tokens order[first] .. order[first + count - 1], whose adapter is at this place.
struct Group {
  int64_t first, count, place;
};
// A piece of the work with A: the rows [from, to) of a part, for the tokens of a group.
struct Piece {
  Group group;
  int64_t part, from, to;
};

// low = x . a for M tokens and N rows of a, of which `rows` exist; numbers of a token's are `step` apart.
template <class T, int M, int N>
static void shrink_tile(const typename T::Input* const* x, int64_t in, const typename T::Number* a, int64_t rows, float* low,
                        int64_t row, int64_t step) {
  const typename T::Number* w[N];
  for (int n = 0; n < N; n++) w[n] = a + std::min<int64_t>(n, rows - 1) * in;
  Reg sums[std::max(M * N, kWidth)] = {};
  int64_t k = 0;
  for (; k + 2 * kWidth <= in; k += 2 * kWidth) {
    typename T::Left left[M];
    for (int m = 0; m < M; m++) left[m] = T::left(x[m], k);
    for (int n = 0; n < N; n++)
      for (int m = 0; m < M; m++) sums[m * N + n] = T::add(sums[m * N + n], left[m], w[n] + k);
  }
  float totals[std::max(M * N, kWidth)];
  for (int i = 0; i < M * N; i += kWidth) reg(totals + i) = fold<kWidth>(sums + i);
  for (int m = 0; m < M; m++)
    for (int n = 0; n < rows && n < N; n++) {
      float sum = totals[m * N + n];
      for (int64_t i = k; i < in; i++) sum += T::input(x[m], i) * T::one(w[n][i]);
      low[m * row + n * step] = sum;
    }
}

// The same for any number of rows of a.
template <class T, int M, int N = std::min(kSums / M, kMostRows)>
static void shrink_rows(const typename T::Input* const* x, int64_t in, const typename T::Number* a, int64_t rows, float* low,
                        int64_t row, int64_t step) {
  static_assert(N > 0, "a tile of no rows never ends");
  for (; rows > 0; rows -= N, a += N * in, low += N * step) {
    if constexpr (N > kSums / kMostTokens)
      if (rows <= N / 2) return shrink_rows<T, M, N / 2>(x, in, a, rows, low, row, step);
    shrink_tile<T, M, N>(x, in, a, rows, low, row, step);
  }
}

// y[from .. to) += low . b for M tokens, with b [rank, out]. Where parts alternate, each pair of outputs has a pair of
// factors.
template <class T, int M, bool kAlternate, int C = std::max(1, kSums / M / (kAlternate && M == kMostTokens ? 4 : 2))>
static void expand_tile(float* const* y, int64_t out, const float* low, int64_t row, const typename T::Number* b,
                        int64_t rank, int64_t from, int64_t to) {
  static_assert(C > 0, "a tile of no outputs never ends");
  constexpr int64_t kOne = 2 * kWidth;  // outputs of two vectors
  for (; from + C * kOne <= to; from += C * kOne) {
    Two sums[M][C];
    for (int m = 0; m < M; m++)
      for (int c = 0; c < C; c++) sums[m][c] = T::arrange(Full::widen(y[m] + from + c * kOne));
    for (int64_t r = 0; r < rank; r++) {
      Two left[M];
      for (int m = 0; m < M; m++) left[m] = T::template factors<kAlternate>(low + m * row + (kAlternate ? 2 * r : r));
      for (int c = 0; c < C; c++) {
        const Two right = T::widen(b + r * out + from + c * kOne);
        for (int m = 0; m < M; m++) {
          sums[m][c].first = fused(left[m].first, right.first, sums[m][c].first);
          sums[m][c].second = fused(left[m].second, right.second, sums[m][c].second);
        }
      }
    }
    for (int m = 0; m < M; m++)
      for (int c = 0; c < C; c++) {
        const Two made = T::restore(sums[m][c]);
        reg(y[m] + from + c * kOne) = made.first, reg(y[m] + from + c * kOne + kWidth) = made.second;
      }
  }
  if constexpr (C > 1) return expand_tile<T, M, kAlternate, C / 2>(y, out, low, row, b, rank, from, to);
  for (; from < to; from++)
    for (int m = 0; m < M; m++) {
      float sum = y[m][from];
      for (int64_t r = 0; r < rank; r++)
        sum += low[m * row + (kAlternate ? 2 * r + from % 2 : r)] * T::one(b[r * out + from]);
      y[m][from] = sum;
    }
}

// Calls f(std::integral_constant<int, M>, first) for tiles of up to kMostTokens of `count` tokens.
template <class F>
static void by_tile(int64_t count, F f) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) f(std::integral_constant<int, 4>(), i);
  if (count - i >= 2) f(std::integral_constant<int, 2>(), i), i += 2;
  if (i < count) f(std::integral_constant<int, 1>(), i);
}

// The adapters of some tokens, at one product of the model.
struct Adapters {
  const float* x;                    // [tokens, in]
  float* y;                          // [tokens, out]
  const void *a, *b;                 // [places, parts * rank, in] and [places, rank, out]
  const int32_t* ranks;              // [places, stride]
  int64_t in, out, parts, rank, stride;
  bool half, alternate;              // alternate: parts belong to outputs in turns of one
  int64_t width[3] = {};
  std::vector<int32_t> order;        // tokens by adapter
  std::vector<float> low;            // [tokens, parts * rank], or where parts alternate [tokens, rank, 2]
  std::vector<Group> groups, alone;  // tokens that share an adapter, and tokens that are alone with theirs
  std::vector<Piece> pieces;         // of all A
  int64_t shrinking = 0, expanding = 0;  // multiplications

  // Arguments of the call from `first` on: a, b, the place of each token's adapter or -1, ranks [places, parts or more].
  // Its attributes `first`, `second` and `third` are the widths of the parts.
  Adapters(const Call& call, int64_t first, const float* x, int64_t tokens, float* y) : x(x), y(y) {
    const Array &a_of = call.argument(first), &b_of = call.argument(first + 1), &ranks_of = call.argument(first + 3);
    a = a_of.data, b = b_of.data, half = a_of.dtype == XLA_FFI_DataType_BF16;
    in = a_of.dims[2], out = b_of.dims[2], rank = b_of.dims[1];
    ranks = data<int32_t>(ranks_of), stride = ranks_of.dims[1];
    width[0] = call.attribute<int64_t>("first"), width[1] = call.attribute<int64_t>("second");
    width[2] = call.attribute<int64_t>("third");
    parts = 1 + (width[1] > 0) + (width[2] > 0);
    alternate = parts == 2 && width[0] == 1 && width[1] == 1;
    if (kChecked) check(data<int32_t>(call.argument(first + 2)), tokens, a_of.dims[0], ranks_of.dims[0]);
    sort(data<int32_t>(call.argument(first + 2)), tokens, a_of.dims[0]);
    const auto shared = [](const Group& group) { return group.count > 1; };
    const auto lone = std::stable_partition(groups.begin(), groups.end(), shared);
    if (groups.end() - lone < 2 * call.num_threads()) return;  // too few for all threads
    alone.assign(lone, groups.end());
    groups.erase(lone, groups.end());
  }

  void check(const int32_t* place, int64_t tokens, int64_t places, int64_t of_ranks) const {
    check_index("the number of places", places, 0, of_ranks + 1);
    check_index("the number of parts", parts, 0, stride + 1);
    for (int64_t t = 0; t < tokens; t++) {
      check_index("places", place[t], -1, places, t);
      for (int64_t p = 0; p < parts && place[t] >= 0; p++)
        check_index("ranks", ranks[place[t] * stride + p], 0, rank + 1, place[t], p);
    }
  }

  // Orders tokens, which have adapters at these places, and divides their work with A into pieces.
  void sort(const int32_t* place, int64_t tokens, int64_t places) {
    for (int64_t t = 0; t < tokens; t++)
      if (place[t] >= 0 && place[t] < places) order.push_back(t);
    std::stable_sort(order.begin(), order.end(), [=](int32_t s, int32_t t) { return place[s] < place[t]; });
    low.resize(order.size() * parts * rank);
    for (size_t i = 0, end; i < order.size(); i = end) {
      const int64_t own = place[order[i]];
      for (end = i + 1; end < order.size() && place[order[end]] == own;) end++;
      groups.push_back({static_cast<int64_t>(i), static_cast<int64_t>(end - i), own});
      divide(groups.back());
    }
  }

  void divide(const Group& group) {
    const int32_t* own = ranks + group.place * stride;
    const int64_t rows = kSums / (group.count >= 4 ? 4 : group.count >= 2 ? 2 : 1);
    for (int64_t p = 0; p < parts; p++)
      for (int64_t r = 0; r < own[p]; r += rows) {
        pieces.push_back({group, p, r, std::min<int64_t>(r + rows, own[p])});
        shrinking += group.count * rows * in;
      }
    expanding += group.count * *std::max_element(own, own + parts) * out;
  }

  // The rows of a piece of A, and their bytes.
  const uint8_t* rows_of_a(int64_t i) const {
    const Piece& piece = pieces[i];
    const int64_t row = (piece.group.place * parts + piece.part) * rank + piece.from;
    return static_cast<const uint8_t*>(a) + row * in * (half ? 2 : 4);
  }
  int64_t bytes_of_a(int64_t i) const { return (pieces[i].to - pieces[i].from) * in * (half ? 2 : 4); }

  // Multiplies x with a piece of A. pairs: x rounded to pairs of bfloat16, `row` pairs for each token; null: it is not
  // rounded.
  void shrink(int64_t i, const int32_t* pairs = nullptr, int64_t row = 0) {
    if (!half) shrink<Full>(i, x, in);
    if (half && !pairs) shrink<Half>(i, x, in);
#ifdef HAS_PAIRS
    if (half && pairs) shrink<Paired>(i, pairs, row);
#endif
  }

  // inputs: x as the format has it, with rows of this size.
  template <class T>
  void shrink(int64_t i, const typename T::Input* inputs, int64_t size) {
    const Piece& piece = pieces[i];
    const int64_t row = parts * rank, step = alternate ? parts : 1;
    const auto* own = reinterpret_cast<const typename T::Number*>(rows_of_a(i));
    float* to = low.data() + piece.group.first * row;
    to += alternate ? piece.part + 2 * piece.from : piece.part * rank + piece.from;
    by_tile(piece.group.count, [&](auto tall, int64_t t) {
      const typename T::Input* rows[tall];
      for (int m = 0; m < tall; m++) rows[m] = inputs + order[piece.group.first + t + m] * size;
      shrink_rows<T, tall>(rows, in, own, piece.to - piece.from, to + t * row, row, step);
    });
  }

  void shrink_all(const Call& call) {
    in_turns(call, pieces.size(), shrinking, [this](int64_t i) { shrink(i); });
  }

  // Adds the products with B. Threads take some outputs of all tokens that share adapters. Of tokens that are alone with
  // theirs, each thread takes some, and prefetches the next token's B meanwhile.
  void expand_all(const Call& call) {
    const int64_t pieces = (out + kOutputs - 1) / kOutputs, threads = call.num_threads();
    in_turns(call, groups.empty() ? 0 : pieces, expanding, [this](int64_t i) {
      for (const Group& group : groups) expand(group, i * kOutputs, std::min(out, (i + 1) * kOutputs));
    });
    const int64_t count = alone.size(), slices = (out + kSlice - 1) / kSlice;
    const int64_t lines = (bytes_of_b() / 64 + slices - 1) / slices;  // of the next token's B for each slice
    parallel_for(call, count ? threads : 0, [=](int64_t thread) {
      const int64_t end = (thread + 1) * count / threads;
      for (int64_t t = thread * count / threads; t < end; t++) {
        const uint8_t* next = t + 1 < end ? b_of(alone[t + 1]) : nullptr;
        for (int64_t i = 0; i < slices; i++) {
          for (int64_t line = i * lines; next && line < (i + 1) * lines; line++) __builtin_prefetch(next + 64 * line, 0, 2);
          expand(alone[t], i * kSlice, std::min(out, (i + 1) * kSlice));
        }
      }
    });
  }

  int64_t bytes_of_b() const { return rank * out * (half ? 2 : 4); }
  const uint8_t* b_of(const Group& group) const {
    return static_cast<const uint8_t*>(b) + group.place * bytes_of_b();
  }

  void expand(const Group& group, int64_t from, int64_t to) {
    const int32_t* own = ranks + group.place * stride;
    const auto add = [&](int64_t part, int64_t rows, int64_t begin, int64_t until) {
      if (!rows || begin >= until) return;
      half ? expand<Half>(group, part, rows, begin, until) : expand<Full>(group, part, rows, begin, until);
    };
    if (parts == 1 || alternate) return add(0, *std::max_element(own, own + parts), from, to);
    for (int64_t begin = from - from % (width[0] + width[1] + width[2]); begin < to;)
      for (int64_t p = 0; p < parts; begin += width[p++])
        add(p, own[p], std::max(from, begin), std::min(to, begin + width[p]));
  }

  // With `count` rows of B.
  template <class T>
  void expand(const Group& group, int64_t part, int64_t count, int64_t from, int64_t to) {
    const float* factors = low.data() + group.first * parts * rank + part * rank;
    const auto* rows = reinterpret_cast<const typename T::Number*>(b_of(group));
    by_tile(group.count, [&](auto tall, int64_t t) {
      float* of[tall];
      for (int m = 0; m < tall; m++) of[m] = y + order[group.first + t + m] * out;
      const auto tile = alternate ? expand_tile<T, tall, true> : expand_tile<T, tall, false>;
      tile(of, out, factors + t * parts * rank, parts * rank, rows, count, from, to);
    });
  }

  // Calls f(i) for i < count on the threads for which so many multiplications pay.
  template <class F>
  static void in_turns(const Call& call, int64_t count, int64_t work, F f) {
    if (!count || !work) return;
    const int64_t turns = std::clamp<int64_t>(work / kWork, 1, std::min<int64_t>(16, count));
    parallel_for(call, turns, [=](int64_t turn) {
      for (int64_t i = turn * count / turns; i < (turn + 1) * count / turns; i++) f(i);
    });
  }
};
