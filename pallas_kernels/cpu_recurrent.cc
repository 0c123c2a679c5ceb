// Recurrent layers on CPU, called by XLA through its foreign function interface: the causal convolution of channels,
// the gated delta rule and Mamba-2 (short_conv, delta_net and mamba2 have a reference.py each), with states in place.
//
// A thread's piece is a row and some of its heads, with all tokens of the row. So a row's results have the same bits,
// whatever else is in the batch. A row of one token reads its states from memory once: the rule's update of a matrix,
// or of a strip of its columns, follows its two products while that is in the cache. Longer rows are computed in chunks
// of kChunk tokens by products of small matrices, with the state in the second-level cache. All sums are float32.

#include <cmath>
#include <cstring>
#include <vector>

#include "cpu_strips.h"
#include "cpu_threads.h"

constexpr int64_t kChunk = 32;  // tokens of a chunk; a multiple of kWidth
constexpr int64_t kMostTaps = 16;
constexpr int64_t kLine = 16;     // numbers of a cache line
constexpr int64_t kAhead = 1024;  // how many numbers further on a matrix is prefetched, and into the next head's
constexpr float kEps = 1e-6f;  // added to the squared lengths of queries and keys, as `delta_net.reference.EPS`

// The rows of a batch (state_rows.py). Arguments of a call from `at` on: the slots from which rows continue, and those
// that they write [rows]; which rows begin their sequence [rows]; the begin of each row's tokens [rows + 1]; the state
// from which slots count. Rows without tokens write nothing.
struct Rows {
  const int32_t *source, *target, *fresh, *starts;
  int64_t count, first;

  Rows(const Call& call, int64_t at, int64_t tokens, int64_t states)
      : source(data<int32_t>(call.argument(at))), target(data<int32_t>(call.argument(at + 1))),
        fresh(data<int32_t>(call.argument(at + 2))), starts(data<int32_t>(call.argument(at + 3))),
        count(call.argument(at).dims[0]), first(*data<int32_t>(call.argument(at + 4))) {
    if (kChecked) check(tokens, states);
  }

  int64_t length(int64_t row) const { return starts[row + 1] - starts[row]; }
  int64_t tokens() const { return starts[count]; }

  // The state [size] from which a row continues, in an array of states; null: zeros.
  const float* before(const float* states, int64_t row, int64_t size) const {
    return fresh[row] ? nullptr : states + (first + source[row]) * size;
  }
  float* after(float* states, int64_t row, int64_t size) const { return states + (first + target[row]) * size; }

 private:
  void check(int64_t tokens, int64_t states) const {
    check_index("first", first, 0, states);
    check_index("q_start", starts[0], 0, tokens + 1, 0);
    for (int64_t row = 0; row < count; row++) {
      check_index("q_start", starts[row + 1], starts[row], tokens + 1, row + 1);
      if (!length(row)) continue;
      check_index("source", source[row], 0, states - first, row);
      check_index("target", target[row], 0, states - first, row);
    }
  }
};

// Memory of a thread for its pieces. What it held before is undefined.
static float* room(int64_t size) {
  static thread_local std::vector<float> floats;
  if (static_cast<int64_t>(floats.size()) < size) floats.resize(size);
  return floats.data();
}

// Loads or stores `count` numbers, or kWidth if there are more. `store_some` would call a library for each register.
static inline Reg get(const float* from, int64_t count) { return load_some<Float32>(from, count); }
static inline void put(Reg x, float* to, int64_t count) {
  if (count >= kWidth)
    reg(to) = x;
  else
    store_some<Float32>(x, to, count);
}

// to[j, i] = from[i, j] for `rows` rows from, of `columns` numbers.
static void transpose_all(const float* from, int64_t from_row, int64_t rows, int64_t columns, float* to,
                          int64_t to_row) {
  for (int64_t i = 0; i < rows; i += kWidth)
    for (int64_t j = 0; j < columns; j += kWidth) {
      if (i + kWidth > rows || j + kWidth > columns) {
        for (int64_t m = i; m < std::min(rows, i + kWidth); m++)
          for (int64_t n = j; n < std::min(columns, j + kWidth); n++) to[n * to_row + m] = from[m * from_row + n];
        continue;
      }
      Reg block[kWidth];
      for (int m = 0; m < kWidth; m++) block[m] = reg(from + (i + m) * from_row + j);
      transpose(block);
      for (int m = 0; m < kWidth; m++) reg(to + (j + m) * to_row + i) = block[m];
    }
}

// y[m, n] = keep * y[m, n] + sum over k < count of a[m * a_row + k * step] * b[k, n]; `columns` is a multiple of
// kWidth. With `lower`, all a[m, k] with k > m are zeros.
static void product(int64_t rows, int64_t columns, int64_t count, const float* a, int64_t a_row, int64_t step,
                    const float* b, int64_t b_row, float keep, float* y, int64_t y_row, bool lower = false) {
  for (int64_t n = 0; n < columns;) {
    const bool wide = columns - n >= kColumns;
    for (int64_t m = 0, strips = (rows + kTall - 1) / kTall; strips; strips--) {
      const int64_t height = (rows - m) / strips, some = lower ? std::min(count, m + height) : count;
      const auto multiply = wide ? multiply_strip<kWide, kTall> : multiply_strip<1, kTall>;
      multiply(height, a + m * a_row, a_row, step, b + n, b_row, some, keep, y + m * y_row + n, y_row);
      m += height;
    }
    n += wide ? kColumns : kWidth;
  }
}

// The convolution.

// Every second number of a, then of b: those at odd places with Odd = 1.
template <int Odd, size_t... I>
static inline Reg every_second(Reg a, Reg b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, static_cast<int>(2 * I + Odd)...);
}

// The weights of some channels by tap [width, padded], the last of which is a token's own, and the bias [padded].
struct Taps {
  int64_t width, channels, padded;
  const float* weights;
  const float* bias() const { return weights + width * padded; }
  static int64_t size(int64_t width, int64_t channels) { return (width + 1) * round_up(channels, kWidth); }

  // From weights [channels, width] and a bias [channels], or null.
  Taps(const float* from, const float* bias, int64_t width, int64_t channels, float* to)
      : width(width), channels(channels), padded(round_up(channels, kWidth)), weights(to) {
    int64_t c = 0;
    for (; width == 4 && c + kWidth <= channels; c += kWidth) {
      Reg block[4];
      for (int i = 0; i < 4; i++) block[i] = reg(from + 4 * c + i * kWidth);
      const Reg even_low = every_second<0>(block[0], block[1], Lanes());
      const Reg even_high = every_second<0>(block[2], block[3], Lanes());
      const Reg odd_low = every_second<1>(block[0], block[1], Lanes());
      const Reg odd_high = every_second<1>(block[2], block[3], Lanes());
      reg(to + c) = every_second<0>(even_low, even_high, Lanes());
      reg(to + padded + c) = every_second<0>(odd_low, odd_high, Lanes());
      reg(to + 2 * padded + c) = every_second<1>(even_low, even_high, Lanes());
      reg(to + 3 * padded + c) = every_second<1>(odd_low, odd_high, Lanes());
    }
    transpose_all(from + c * width, width, channels - c, width, to + c, padded);
    for (int64_t tap = 0; tap < width; tap++) std::fill(to + tap * padded + channels, to + (tap + 1) * padded, 0.f);
    std::fill_n(to + width * padded, padded, 0.f);
    if (bias) std::copy_n(bias, channels, to + width * padded);
  }
};

// The inputs of a row's convolution: x [tokens, channels], and a copy of the last ones before the row.
struct Inputs {
  const float* x;
  int64_t x_row;
  float* before;  // [width - 1, padded]
  const Taps& taps;
  static int64_t size(const Taps& taps) { return taps.width * taps.padded; }

  Inputs(const float* x, int64_t x_row, const float* state, int64_t state_row, const Taps& taps, float* copy)
      : x(x), x_row(x_row), before(copy), taps(taps) {
    for (int64_t i = 0; i < taps.width - 1; i++) {
      float* to = copy + i * taps.padded;
      if (state) std::copy_n(state + i * state_row, taps.channels, to);
      std::fill(to + (state ? taps.channels : 0), to + taps.padded, 0.f);
    }
  }

  const float* at(int64_t token) const {
    return token < 0 ? before + (taps.width - 1 + token) * taps.padded : x + token * x_row;
  }

  // mixed[i] is the result of token first + i, after silu if wanted.
  void convolve(int64_t first, int64_t count, bool activates, float* mixed, int64_t mixed_row) const {
    const auto all = taps.width == 4 ? &Inputs::mix<4> : taps.width == 3 ? &Inputs::mix<3> : &Inputs::mix<0>;
    for (int64_t i = 0; i < count; i++) (this->*all)(first + i, activates, mixed + i * mixed_row);
  }

  // Writes the last inputs of a row of `count` tokens.
  void keep(int64_t count, float* state, int64_t state_row) const {
    for (int64_t i = 0; i < taps.width - 1; i++)
      std::copy_n(at(count - taps.width + 1 + i), taps.channels, state + i * state_row);
  }

 private:
  // The result of a token, with a width of W, or with any where W is 0.
  template <int W>
  void mix(int64_t token, bool activates, float* to) const {
    const int64_t width = W ? W : taps.width, channels = taps.channels, padded = taps.padded;
    const float *weights = taps.weights, *bias = taps.bias(), *from[kMostTaps];
    for (int64_t tap = 0; tap < width; tap++) from[tap] = at(token - width + 1 + tap);
    for (int64_t c = 0; c < channels; c += kWidth) {
      Reg sum = reg(bias + c);
      for (int64_t tap = 0; tap < width; tap++)
        sum = fused(get(from[tap] + c, channels - c), reg(weights + tap * padded + c), sum);
      if (activates) {
        const Reg e = exp_of(sum > 0 ? -sum : sum);
        sum = (sum > 0 ? sum : sum * e) / (1 + e);
      }
      put(sum, to + c, channels - c);
    }
  }
};

// Convolves x [tokens, channels] of all rows into `mixed`, and replaces the rows' last inputs [states, width - 1,
// channels]. weights [channels, width], bias [channels] or empty.
static void convolve_rows(const Call& call, const Rows& rows, const Array& x, const Array& weights, const Array& bias,
                          const Array& states, bool activates, float* mixed) {
  const int64_t channels = x.dims[1], width = weights.dims[1], size = (width - 1) * channels;
  constexpr int64_t kTokens = 16;  // of a piece
  std::vector<float> by_tap(Taps::size(width, channels));
  const float* biases = element_count(bias) ? data<float>(bias) : nullptr;
  const Taps taps(data<float>(weights), biases, width, channels, by_tap.data());
  std::vector<std::pair<int64_t, int64_t>> pieces;  // row, first token within the row
  for (int64_t row = 0; row < rows.count; row++)
    for (int64_t t = 0; t < rows.length(row); t += kTokens) pieces.push_back({row, t});
  const auto inputs_of = [&](int64_t row) {
    const float* from = data<float>(x) + rows.starts[row] * channels;
    const float* last = rows.before(data<float>(states), row, size);
    return Inputs(from, channels, last, channels, taps, room(Inputs::size(taps)));
  };
  parallel_for(call, pieces.size(), [&](int64_t i) {
    const auto [row, t] = pieces[i];
    const int64_t count = std::min(kTokens, rows.length(row) - t);
    inputs_of(row).convolve(t, count, activates, mixed + (rows.starts[row] + t) * channels, channels);
  });
  for (int64_t row = 0; row < rows.count; row++)
    if (rows.length(row)) inputs_of(row).keep(rows.length(row), rows.after(data<float>(states), row, size), channels);
}

static void clear_padding(const Array& out, int64_t tokens) {
  const int64_t size = element_count(out) / out.dims[0];
  std::fill(data<float>(out) + tokens * size, data<float>(out) + element_count(out), 0.f);
}

// Arguments: x [tokens, channels]; weights [channels, width] and their bias [channels] or an empty array; the states
// [states, width - 1, channels], which share their memory with the second result; the rows.
static void short_conv(const Call& call) {
  const Array& x = call.argument(0);
  const Rows rows(call, 4, x.dims[0], call.argument(3).dims[0]);
  convolve_rows(call, rows, x, call.argument(1), call.argument(2), call.result(1), false, data<float>(call.result()));
  clear_padding(call.result(), rows.tokens());
}
DEFINE_HANDLER(ShortConv, short_conv, kF32, kF32, kF32, kF32, kS32, kS32, kS32, kS32, kS32)

// since[i, j] = exp(decay[j + 1] + .. + decay[i]) for j <= i < count, 0 for other j < kChunk; total[i] = exp(decay[0] +
// .. + decay[i]). Each sum is computed by itself: differences of sums from the beginning would lose digits.
static void decays(const float* decay, int64_t decay_row, int64_t count, float* since, float* total) {
  float sums[kChunk] = {};
  float whole = 0;
  for (int64_t i = 0; i < count; i++) {
    const float own = decay[i * decay_row];
    whole += own, total[i] = std::exp(whole);
    for (int64_t j = 0; j < i; j++) sums[j] += own;
    float* to = since + i * kChunk;
    for (int64_t j = 0; j < kChunk; j += kWidth) reg(to + j) = j <= i ? exp_of(reg(sums + j)) : Reg{};
    std::fill(to + i + 1, to + kChunk, 0.f);
  }
}

// The gated delta rule.

struct DeltaRule {
  const Rows& rows;
  const float *qkv, *decay, *rate;
  const std::vector<Taps>& taps;  // of each key head
  float *matrix, *inputs, *out;
  int64_t heads, group, key, value, channels, width;
  int64_t padded = round_up(channels, kWidth), value_padded = round_up(value, kWidth);

  // q and k of a token's channels become vectors of length 1, and q is divided by sqrt(key).
  void to_unit(float* mixed) const {
    for (int part = 0; part < 2; part++, mixed += key) {
      Reg squares = {};
      for (int64_t i = 0; i < key; i += kWidth) {
        const Reg x = get(mixed + i, key - i);
        squares += x * x;
      }
      const float factor = 1 / std::sqrt((sum_of(squares) + kEps) * (part ? 1 : key));
      for (int64_t i = 0; i < key; i++) mixed[i] *= factor;
    }
  }

  // One token of a value head. Rows of its matrix [key, value] are multiplied by keep [key] first; before may be null.
  struct Token {
    const float *k, *reading, *seeing, *keep, *v;  // reading and seeing: k and q times keep
    float both, rate;                              // both: k . q
    const float* before;
    float *after, *to;
  };

  // D registers of columns of the matrix, from d on; one of them may be partly beyond the last column. Where they are
  // whole rows, memory is read from front to back.
  template <int D>
  void update_columns(const Token& token, int64_t d) const {
    const int64_t left = value - d, ahead = D * kWidth == value ? kAhead : 0;
    const auto of = [left](const float* from, int n) { return D > 1 ? reg(from + n * kWidth) : get(from, left); };
    const auto keep = [left](Reg x, float* to, int n) { D > 1 ? void(reg(to + n * kWidth) = x) : put(x, to, left); };
    Reg read[D] = {}, seen[D] = {}, added[D];
    for (int64_t i = 0; token.before && i < key; i++) {
      const float* from = token.before + i * value + d;
      for (int n = 0; n < D; n++) {
        if (ahead && n * kWidth % kLine == 0) __builtin_prefetch(from + ahead + n * kWidth);
        const Reg s = of(from, n);
        read[n] = fused(s, token.reading[i] - Floats{}, read[n]);
        seen[n] = fused(s, token.seeing[i] - Floats{}, seen[n]);
      }
    }
    for (int n = 0; n < D; n++) {
      added[n] = token.rate * (of(token.v + d, n) - read[n]);
      keep(seen[n] + token.both * added[n], token.to + d, n);
    }
    for (int64_t i = 0; i < key; i++)
      for (int n = 0; n < D; n++) {
        const int64_t at = i * value + d;
        Reg s = {};
        if (token.before) {
          s = of(token.before + at, n) * token.keep[i];
          if (!ahead && n * kWidth % kLine == 0) __builtin_prefetch(token.before + at + (D + n) * kWidth);
        }
        keep(fused(added[n], token.k[i] - Floats{}, s), token.after + at, n);
      }
  }

  void one_token(const Inputs& in, int64_t head, int64_t token, const float* before, float* after, float* free) const {
    // Sums of as many columns as registers hold beside the operands, or else of a few.
    constexpr int kMany = kRegisters == 32 ? 8 : 32 / kWidth, kSome = 32 / kWidth;
    float *q = free, *k = q + key, *keep = free + padded, *reading = keep + key, *seeing = reading + key;
    in.convolve(0, 1, true, free, padded);
    to_unit(free);
    float both = 0;
    for (int64_t i = 0; i < key; i++) both += q[i] * k[i];
    for (int64_t g = 0; g < group; g++) {
      const int64_t at = (token * heads + head) * group + g, matrix = g * key * value;
      std::fill_n(keep, key, std::exp(decay[at]));
      for (int64_t i = 0; i < key; i++) reading[i] = k[i] * keep[i], seeing[i] = q[i] * keep[i];
      const Token one{k, reading, seeing, keep, k + key + g * value, both, rate[at], before ? before + matrix : nullptr,
                      after + matrix, out + at * value};
      int64_t d = 0;
      for (; d + kMany * kWidth <= value; d += kMany * kWidth) update_columns<kMany>(one, d);
      for (; d + kSome * kWidth <= value; d += kSome * kWidth) update_columns<kSome>(one, d);
      for (; d < value; d += kWidth) update_columns<1>(one, d);
    }
  }

  // A chunk of `count` tokens of one value head. mixed [count, padded]; alike [2 * kChunk, kChunk] are the products of
  // its keys, then of its queries, with its keys. state [key, value_padded].
  void chunk(const float* mixed, const float* v, const float* alike, int64_t count, const float* decay,
             const float* rate, int64_t heads_row, float* state, float* to, int64_t to_row, float* free) const {
    float *since = free, *lower = since + kChunk * kChunk, *scores = lower + kChunk * kChunk;
    float *added = scores + kChunk * kChunk, *seen = added + kChunk * value_padded;
    float* total = seen + kChunk * value_padded;
    decays(decay, heads_row, count, since, total);
    for (int64_t i = 0; i < count; i++)
      for (int64_t j = 0; j < kChunk; j += kWidth) {
        const int64_t at = i * kChunk + j;
        reg(lower + at) = reg(alike + at) * reg(since + at) * -rate[i * heads_row];
        reg(scores + at) = reg(alike + kChunk * kChunk + at) * reg(since + at);
      }
    // The new values U solve U + L U = rate (V - total K S), where L is the strictly lower part of `lower`, negated.
    product(count, value_padded, key, mixed + key, padded, 1, state, value_padded, 0, added, value_padded);
    product(count, value_padded, key, mixed, padded, 1, state, value_padded, 0, seen, value_padded);
    for (int64_t i = 0; i < count; i++)
      for (int64_t d = 0; d < value_padded; d += kWidth) {
        const Reg own = get(v + i * padded + d, value - d);
        Reg& read = reg(added + i * value_padded + d);
        read = rate[i * heads_row] * (own - total[i] * read);
        reg(seen + i * value_padded + d) *= total[i];
      }
    for (int64_t i = 0; i < count; i += kTall) {
      const int64_t height = std::min<int64_t>(kTall, count - i);
      float* own = added + i * value_padded;
      product(height, value_padded, i, lower + i * kChunk, kChunk, 1, added, value_padded, 1, own, value_padded);
      for (int64_t m = 1; m < height; m++)
        product(1, value_padded, m, lower + (i + m) * kChunk + i, kChunk, 1, own, value_padded, 1,
                own + m * value_padded, value_padded);
    }
    product(count, value_padded, count, scores, kChunk, 1, added, value_padded, 1, seen, value_padded, true);
    for (int64_t i = 0; i < count; i++) {
      std::copy_n(seen + i * value_padded, value, to + i * to_row);
      const float until = since[(count - 1) * kChunk + i];
      for (int64_t d = 0; d < value_padded; d += kWidth) reg(added + i * value_padded + d) *= until;
    }
    product(key, value_padded, count, mixed + key, 1, padded, added, value_padded, total[count - 1], state,
            value_padded);
  }

  void many_tokens(const Inputs& in, int64_t head, int64_t first, int64_t count, const float* before, float* after,
                   float* free) const {
    float *mixed = free, *keys = mixed + kChunk * padded, *alike = keys + key * kChunk;
    float *states = alike + 2 * kChunk * kChunk, *rest = states + group * key * value_padded;
    const int64_t heads_row = heads * group, to_row = heads_row * value;
    for (int64_t i = 0; i < group * key; i++)
      for (int64_t d = 0; d < value_padded; d += kWidth)
        reg(states + i * value_padded + d) = before ? get(before + i * value + d, value - d) : Reg{};
    for (int64_t t = 0; t < count; t += kChunk) {
      const int64_t some = std::min(kChunk, count - t), at = (first + t) * heads_row + head * group;
      in.convolve(t, some, true, mixed, padded);
      for (int64_t i = 0; i < some; i++) to_unit(mixed + i * padded);
      transpose_all(mixed + key, padded, some, key, keys, kChunk);
      const int64_t columns = round_up(some, kWidth);
      product(some, columns, key, mixed + key, padded, 1, keys, kChunk, 0, alike, kChunk);
      product(some, columns, key, mixed, padded, 1, keys, kChunk, 0, alike + kChunk * kChunk, kChunk);
      for (int64_t g = 0; g < group; g++)
        chunk(mixed, mixed + 2 * key + g * value, alike, some, decay + at + g, rate + at + g, heads_row,
              states + g * key * value_padded, out + (at + g) * value, to_row, rest);
    }
    for (int64_t i = 0; i < group * key; i++) std::copy_n(states + i * value_padded, value, after + i * value);
  }

  int64_t room_size() const {
    const int64_t chunks = kChunk * (padded + key + 5 * kChunk + 2 * value_padded + 1) + group * key * value_padded;
    return width * padded + std::max(padded + 3 * key, chunks);
  }

  void run(int64_t row, int64_t head) const {
    const int64_t count = rows.length(row), first = rows.starts[row];
    const int64_t size = group * key * value, kept = (width - 1) * channels;
    float* free = room(room_size());
    const float *given = rows.before(matrix, row, heads * size), *last = rows.before(inputs, row, heads * kept);
    const float* before = given ? given + head * size : nullptr;
    float* after = rows.after(matrix, row, heads * size) + head * size;
    const Inputs in(qkv + (first * heads + head) * channels, heads * channels, last ? last + head * kept : nullptr,
                    channels, taps[head], free);
    if (count == 1)
      one_token(in, head, first, before, after, free + Inputs::size(taps[head]));
    else
      many_tokens(in, head, first, count, before, after, free + Inputs::size(taps[head]));
    in.keep(count, rows.after(inputs, row, heads * kept) + head * kept, channels);
  }
};

// Runs f(row, piece) for each row with tokens and `pieces` pieces of it. Rows at the end, which are long, come first. A
// thread takes several pieces of a row of one token, one after the other, as their states lie in memory.
template <class F>
static void for_rows(const Call& call, const Rows& rows, int64_t pieces, F f) {
  const int64_t most = std::clamp<int64_t>(rows.count * pieces / (8 * call.num_threads()), 1, pieces);
  struct Item {
    int64_t row, begin, end;
  };
  std::vector<Item> items;
  for (int64_t row = rows.count - 1; row >= 0; row--)
    for (int64_t at = 0, some = rows.length(row) > 1 ? 1 : most; rows.length(row) && at < pieces; at += some)
      items.push_back({row, at, std::min(pieces, at + some)});
  parallel_for(call, items.size(), [&](int64_t i) {
    for (int64_t piece = items[i].begin; piece < items[i].end; piece++) f(items[i].row, piece);
  });
}

// Arguments: qkv [tokens, heads, channels]; decay and rate [tokens, heads, group]; weights of the convolution [heads,
// channels, width]; matrices [states, heads, group, key, value] and last inputs [states, heads, (width - 1) *
// channels], which share their memory with the second and third result; the rows. Results: [tokens, heads, group,
// value].
static void delta_net(const Call& call) {
  const Array &qkv = call.argument(0), &weights = call.argument(3), &matrix = call.result(1);
  const Rows rows(call, 6, qkv.dims[0], matrix.dims[0]);
  const int64_t heads = qkv.dims[1], channels = qkv.dims[2], width = weights.dims[2];
  const int64_t size = Taps::size(width, channels);
  std::vector<float> by_tap(heads * size);
  std::vector<Taps> taps;
  for (int64_t head = 0; head < heads; head++) {
    const float* own = data<float>(weights) + head * channels * width;
    taps.push_back({own, nullptr, width, channels, by_tap.data() + head * size});
  }
  const DeltaRule net{rows, data<float>(qkv), data<float>(call.argument(1)), data<float>(call.argument(2)), taps,
                     data<float>(matrix), data<float>(call.result(2)), data<float>(call.result()),
                     heads, matrix.dims[2], matrix.dims[3], matrix.dims[4], channels, width};
  for_rows(call, rows, heads, [&](int64_t row, int64_t head) { net.run(row, head); });
  clear_padding(call.result(), rows.tokens());
}
DEFINE_HANDLER(DeltaNet, delta_net, kF32, kF32, kF32, kF32, kF32, kF32, kS32, kS32, kS32, kS32, kS32)

// Mamba-2.

constexpr int64_t kHeads = 4;  // heads of a piece, which share the products of B and C

struct Mamba {
  const Rows& rows;
  const float *x, *bc, *step, *a, *d;  // bc after its convolution
  const int32_t* group;
  const std::vector<Taps>& taps;  // of the channels of each head
  float *matrix, *inputs, *out;
  int64_t heads, dim, state, shared, width;
  int64_t dim_padded = round_up(dim, kWidth), state_padded = round_up(state, kWidth);

  const float* b(int64_t token, int64_t head) const { return bc + token * shared + group[head] * state; }
  const float* c(int64_t token, int64_t head) const { return b(token, head) + shared / 2; }

  // One token of a head, whose x after the convolution is `own` [dim]. Matrices [dim, state].
  void update(int64_t token, int64_t head, const float* own, const float* before, float* after) const {
    const float *b = this->b(token, head), *c = this->c(token, head), by = step[token * heads + head];
    const float keep = std::exp(by * a[head]);
    float* to = out + (token * heads + head) * dim;
    for (int64_t p = 0; p < dim; p++) {
      Reg sum = {};
      const float added = by * own[p];
      for (int64_t n = 0; n < state; n += kWidth) {
        const int64_t left = state - n;
        if (before && n % kLine == 0) __builtin_prefetch(before + p * state + n + kAhead);
        Reg s = get(b + n, left) * added;
        if (before) s = fused(get(before + p * state + n, left), keep - Floats{}, s);
        put(s, after + p * state + n, left);
        sum = fused(s, get(c + n, left), sum);
      }
      to[p] = sum_of(sum) + d[head] * own[p];
    }
  }

  // A chunk of `count` tokens of a head. own [count, dim_padded] is x after the convolution; alike [kChunk, kChunk] are
  // the products of C and B; matrix [state, dim_padded] is transposed.
  void chunk(int64_t token, int64_t head, float* own, const float* alike, int64_t count, float* matrix,
             float* free) const {
    float *since = free, *total = since + kChunk * kChunk, *decay = total + kChunk, *y = decay + kChunk;
    const float* steps = step + token * heads + head;
    for (int64_t i = 0; i < count; i++) decay[i] = steps[i * heads] * a[head];
    decays(decay, 1, count, since, total);
    product(count, dim_padded, state, c(token, head), shared, 1, matrix, dim_padded, 0, y, dim_padded);
    for (int64_t i = 0; i < count; i++)
      for (int64_t p = 0; p < dim_padded; p += kWidth) {
        Reg &x = reg(own + i * dim_padded + p), &to = reg(y + i * dim_padded + p);
        to = to * total[i] + d[head] * x;
        x *= steps[i * heads];
      }
    float until[kChunk];
    std::copy_n(since + (count - 1) * kChunk, count, until);
    for (int64_t i = 0; i < count * kChunk; i += kWidth) reg(since + i) *= reg(alike + i);
    product(count, dim_padded, count, since, kChunk, 1, own, dim_padded, 1, y, dim_padded, true);
    for (int64_t i = 0; i < count; i++) {
      std::copy_n(y + i * dim_padded, dim, out + ((token + i) * heads + head) * dim);
      for (int64_t p = 0; p < dim_padded; p += kWidth) reg(own + i * dim_padded + p) *= until[i];
    }
    product(state, dim_padded, count, b(token, head), 1, shared, own, dim_padded, total[count - 1], matrix, dim_padded);
  }

  // Some heads of one group.
  void many_tokens(const std::vector<Inputs>& in, int64_t head, int64_t first, int64_t count, const float* before,
                   float* after, float* free) const {
    const int64_t some_heads = in.size(), transposed = state * dim_padded, size = dim * state;
    float *keys = free, *alike = keys + state * kChunk, *own = alike + kChunk * kChunk;
    float *states = own + kChunk * dim_padded, *rest = states + some_heads * transposed;
    std::fill_n(states, some_heads * transposed, 0.f);
    for (int64_t h = 0; before && h < some_heads; h++)
      transpose_all(before + h * size, state, dim, state, states + h * transposed, dim_padded);
    for (int64_t t = 0; t < count; t += kChunk) {
      const int64_t some = std::min(kChunk, count - t), token = first + t;
      transpose_all(b(token, head), shared, some, state, keys, kChunk);
      product(some, round_up(some, kWidth), state, c(token, head), shared, 1, keys, kChunk, 0, alike, kChunk);
      for (int64_t h = 0; h < some_heads; h++) {
        in[h].convolve(t, some, true, own, dim_padded);
        chunk(token, head + h, own, alike, some, states + h * transposed, rest);
      }
    }
    for (int64_t h = 0; h < some_heads; h++)
      transpose_all(states + h * transposed, dim_padded, state, dim, after + h * size, state);
  }

  // Heads [head, end) of a row.
  void run(int64_t row, int64_t head, int64_t end) const {
    const int64_t count = rows.length(row), first = rows.starts[row], size = dim * state, channels = heads * dim;
    const int64_t chunks = kChunk * (state + 2 * kChunk + 2 * dim_padded + 2) + kHeads * state * dim_padded;
    const int64_t copies = kHeads * Inputs::size(taps[head]);
    float* free = room(copies + std::max(chunks, dim_padded));
    const float* given = rows.before(matrix, row, heads * size);
    const float* last = rows.before(inputs, row, (width - 1) * channels);
    const float* before = given ? given + head * size : nullptr;
    float* after = rows.after(matrix, row, heads * size) + head * size;
    std::vector<Inputs> in;
    for (int64_t h = head; h < end; h++)
      in.emplace_back(x + first * channels + h * dim, channels, last ? last + h * dim : nullptr, channels, taps[h],
                      free + (h - head) * Inputs::size(taps[h]));
    free += copies;
    for (int64_t h = 0; count == 1 && h < end - head; h++) {
      in[h].convolve(0, 1, true, free, dim_padded);
      update(first, head + h, free, before ? before + h * size : nullptr, after + h * size);
    }
    if (count > 1) many_tokens(in, head, first, count, before, after, free);
    float* kept = rows.after(inputs, row, (width - 1) * channels);
    for (int64_t h = head; h < end; h++) in[h - head].keep(count, kept + h * dim, channels);
  }
};

// Arguments: x [tokens, heads * dim]; bc [tokens, 2 * groups * state]; step [tokens, heads]; a, d and the group of each
// head [heads]; the convolution's weights and bias for x [channels, width] and [channels] or empty, then for bc;
// matrices [states, heads, dim, state], last inputs of x and of bc [states, width - 1, channels], which share their
// memory with the results from the second on; the rows. Results: [tokens, heads, dim].
static void mamba2(const Call& call) {
  const Array &x = call.argument(0), &bc = call.argument(1), &weights = call.argument(6), &bias = call.argument(7);
  const Array& matrix = call.result(1);
  const Rows rows(call, 13, x.dims[0], matrix.dims[0]);
  const int64_t heads = matrix.dims[1], dim = matrix.dims[2], state = matrix.dims[3], shared = bc.dims[1];
  const int64_t width = weights.dims[1], size = Taps::size(width, dim);
  const int32_t* group = data<int32_t>(call.argument(5));
  if (kChecked)
    for (int64_t h = 0; h < heads; h++) check_index("group", group[h], 0, shared / 2 / state, h);
  std::vector<float> by_tap(heads * size);
  std::vector<Taps> taps;
  for (int64_t h = 0; h < heads; h++)
    taps.push_back({data<float>(weights) + h * dim * width, element_count(bias) ? data<float>(bias) + h * dim : nullptr,
                    width, dim, by_tap.data() + h * size});
  std::vector<int64_t> ends;  // of pieces, each of heads of one group
  for (int64_t h = 0, begin = 0; h < heads; h++)
    if (h + 1 == heads || group[h + 1] != group[h] || h + 1 - begin == kHeads) ends.push_back(begin = h + 1);
  std::vector<float> mixed(rows.tokens() * shared);
  convolve_rows(call, rows, bc, call.argument(8), call.argument(9), call.result(3), true, mixed.data());
  const Mamba net{rows, data<float>(x), mixed.data(), data<float>(call.argument(2)), data<float>(call.argument(3)),
                  data<float>(call.argument(4)), group, taps, data<float>(matrix), data<float>(call.result(2)),
                  data<float>(call.result()), heads, dim, state, shared, width};
  for_rows(call, rows, ends.size(),
           [&](int64_t row, int64_t piece) { net.run(row, piece ? ends[piece - 1] : 0, ends[piece]); });
  clear_padding(call.result(), rows.tokens());
}
DEFINE_HANDLER(Mamba2, mamba2, kF32, kF32, kF32, kF32, kF32, kS32, kF32, kF32, kF32, kF32, kF32, kF32, kF32, kS32, kS32,
               kS32, kS32, kS32)
