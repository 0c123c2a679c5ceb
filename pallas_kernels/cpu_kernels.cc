// Matmul and paged attention on CPU, called by XLA through its foreign function interface; float32.

#include "cpu_kernels.h"

constexpr int64_t kMany = 40;  // rows from which on a panel is worth its transposing

// y = x w^T for the first `count` rows of x [tokens, in], and w [out, in]; the other rows of y are left as they are.
static void matmul(const Call& call) {
  const Array &x = call.argument(0), &w = call.argument(1), &count = call.argument(2);
  const int64_t tokens = std::min<int64_t>(x.dims[0], *data<int32_t>(count)), in = x.dims[1], out = w.dims[0];
  if (tokens <= 0) return;
  const float *xs = data<float>(x), *ws = data<float>(w);
  float* ys = data<float>(call.result());
  parallel_for(call, (out + kPiece - 1) / kPiece, [=](int64_t piece) {
    const int64_t n = piece * kPiece;
    multiply_rows(xs, ws + n * in, ys + n, tokens, std::min(kPiece, out - n), in, in, out, kMany);
  });
}
DEFINE_HANDLER(Matmul, matmul, kF32, kF32, kS32)

// Runs f(token) for the first `count` tokens of x [tokens, ...], some at once.
template <class F>
static void for_tokens(const Call& call, const Array& x, const Array& count, F f) {
  const int64_t tokens = std::min<int64_t>(x.dims[0], *data<int32_t>(count));
  const int64_t size = std::max<int64_t>(1, (1 << 13) * x.dims[0] / std::max<int64_t>(1, element_count(x)));
  parallel_for(call, (tokens + size - 1) / size, [=](int64_t piece) {
    for (int64_t t = piece * size; t < std::min(tokens, (piece + 1) * size); t++) f(t);
  });
}

// y = x / sqrt(mean(x^2) + eps) * scale, for each vector of x [tokens, .., size].
static void rms_norm(const Call& call) {
  const Array &x = call.argument(0), &scale = call.argument(1);
  const int64_t size = scale.dims[0], rows = element_count(x) / size / x.dims[0];
  const float *xs = data<float>(x), *scales = data<float>(scale), eps = call.attribute<float>("eps");
  float* ys = data<float>(call.result());
  for_tokens(call, x, call.argument(2), [=](int64_t token) {
    for (int64_t row = token * rows; row < (token + 1) * rows; row++) {
      const float* from = xs + row * size;
      Vec squares = {};
      int64_t i = 0;
      for (; i + kLanes <= size; i += kLanes) squares += at(from + i) * at(from + i);
      float total = sum(squares);
      for (; i < size; i++) total += from[i] * from[i];
      const float factor = 1 / std::sqrt(total / size + eps);
      for (i = 0; i < size; i++) ys[row * size + i] = from[i] * factor * scales[i];
    }
  });
}
DEFINE_HANDLER(RmsNorm, rms_norm, kF32, kF32, kS32)

// y = (a cos - b sin, b cos + a sin) for the halves a and b of each vector of x [tokens, .., dim]; cos and sin are
// [tokens, dim / 2].
static void rope(const Call& call) {
  const Array &x = call.argument(0), &angles = call.argument(1);
  const int64_t half = angles.dims[1], rows = element_count(x) / (2 * half) / x.dims[0];
  const float *xs = data<float>(x), *cosines = data<float>(angles), *sines = data<float>(call.argument(2));
  float* ys = data<float>(call.result());
  for_tokens(call, x, call.argument(3), [=](int64_t token) {
    const float *cos = cosines + token * half, *sin = sines + token * half;
    for (int64_t row = token * rows; row < (token + 1) * rows; row++) {
      const float *a = xs + 2 * row * half, *b = a + half;
      float* y = ys + 2 * row * half;
      for (int64_t i = 0; i < half; i++) y[i] = a[i] * cos[i] - b[i] * sin[i];
      for (int64_t i = 0; i < half; i++) y[half + i] = b[i] * cos[i] + a[i] * sin[i];
    }
  });
}
DEFINE_HANDLER(Rope, rope, kF32, kF32, kF32, kS32)

// exp(x) for x <= 0, to about 2 units in the last place: 2^round(x / ln 2) times a polynomial of the rest.
static inline Vec exponential(Vec x) {
  typedef int32_t Int __attribute__((vector_size(4 * kLanes)));
  x = x < -87.f ? Vec{} - 87.f : x;
  Vec n = x * 1.44269504f + 12582912.f;  // the addend leaves no room for a fraction
  Int power = ((Int)n << 23) + (127 << 23);
  n -= 12582912.f;
  Vec r = x - n * 0.693145752f - n * 1.42860677e-6f;
  Vec p = 1.f + r * (1.f + r * (0.5f + r * (0.166666657f + r * (0.0416664854f + r * (0.00833345205f + r * 0.00139350991f)))));
  return p * (Vec)power;
}

// y = a / (1 + exp(-a)) * b for the pairs (a, b) of x [tokens, size, 2].
static void silu_gate(const Call& call) {
  const Array& x = call.argument(0);
  const int64_t size = x.dims[1];
  const float* xs = data<float>(x);
  float* ys = data<float>(call.result());
  for_tokens(call, x, call.argument(1), [=](int64_t token) {
    const auto gated = [](const float* from) {
      const Vec low = at(from), high = at(from + kLanes);
      const Vec a = __builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14);
      const Vec e = exponential(a > 0 ? -a : a);
      return (a > 0 ? a : a * e) / (1 + e) * __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15);
    };
    const float* from = xs + 2 * token * size;
    float* y = ys + token * size;
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) at(y + i) = gated(from + 2 * i);
    if (i < size) {
      float last[2 * kLanes] = {};
      std::copy(from + 2 * i, from + 2 * size, last);
      const Vec some = gated(last);
      for (int64_t j = i; j < size; j++) y[j] = some[j - i];
    }
  });
}
DEFINE_HANDLER(SiluGate, silu_gate, kF32, kS32)

// Paged attention.

struct Pages {
  const float* data;  // [pages, 2 (key, value), heads, size, dim]
  int64_t heads, size, dim;
  const float* key(int32_t page, int64_t offset, int64_t head) const {
    return data + ((page * 2 * heads + head) * size + offset) * dim;
  }
  const float* value(int32_t page, int64_t head) const { return key(page, 0, heads + head); }
};

// y[m] += sum over s of weights[m, s] * values[s], for M rows y [dim] and `count` rows of values; D vectors of a row,
// from d on, at once. Meanwhile fetches from `next` on.
template <int M, int D = 4>
static void mix(const float* weights, int64_t stride, const float* values, int64_t count, float* y, int64_t dim,
                const float* next, int64_t d = 0) {
  for (; d + D * kLanes <= dim; d += D * kLanes) {
    Vec sums[D][M];
    for (int i = 0; i < D; i++)
      for (int m = 0; m < M; m++) sums[i][m] = at(y + m * dim + d + i * kLanes);
    for (int64_t s = 0; s < count; s++) {
      Vec left[M];
      if (D > 1) prefetch(next + s * dim + d);
      for (int m = 0; m < M; m++) hold(left[m] = Vec{} + weights[m * stride + s]);
      for (int i = 0; i < D; i++) {
        Vec right = at(values + s * dim + d + i * kLanes);
        hold(right);
        for (int m = 0; m < M; m++) sums[i][m] += left[m] * right;
      }
    }
    for (int i = 0; i < D; i++)
      for (int m = 0; m < M; m++) at(y + m * dim + d + i * kLanes) = sums[i][m];
  }
  if (D > 1 && d < dim) mix<M, 1>(weights, stride, values, count, y, dim, next, d);
}

static void softmax(float* scores, int64_t first, int64_t end, int64_t padded) {
  std::fill(scores, scores + first, -INFINITY);
  std::fill(scores + end, scores + padded, -INFINITY);
  Vec highest = at(scores);
  for (int64_t s = kLanes; s < padded; s += kLanes) highest = at(scores + s) > highest ? at(scores + s) : highest;
  float peak = highest[0];
  for (int i = 1; i < kLanes; i++) peak = std::max(peak, highest[i]);
  Vec total = {};
  for (int64_t s = 0; s < padded; s += kLanes) total += at(scores + s) = exponential(at(scores + s) - peak);
  float norm = 1 / sum(total);
  for (int64_t s = 0; s < padded; s += kLanes) at(scores + s) *= norm;
}

struct Tile {  // query tokens [begin, end) of a row; the first is at `position`
  int64_t row, begin, end, position;
};
constexpr int64_t kTile = 16;

static void paged_attention(const Call& call) {
  const Array &q = call.argument(0), &pages = call.argument(1), &tables = call.argument(2), &lens = call.argument(4);
  const int64_t tokens = q.dims[0], heads = q.dims[1], group = q.dims[2], dim = q.dims[3];
  const int64_t rows = lens.dims[0], width = tables.dims[1], window = call.attribute<int64_t>("window");
  const int32_t *starts = data<int32_t>(call.argument(3)), *lengths = data<int32_t>(lens);
  const Pages cache{data<float>(pages), heads, pages.dims[3], dim};
  const float *in = data<float>(q), scale = call.attribute<float>("scale");
  float* out = data<float>(call.result());

  std::vector<Tile> tiles;
  for (int64_t row = 0; row < rows; row++)
    for (int64_t t = starts[row]; t < starts[row + 1]; t += kTile)
      tiles.push_back({row, t, std::min<int64_t>(t + kTile, starts[row + 1]), lengths[row] - starts[row + 1] + t});
  std::fill(out + starts[rows] * heads * group * dim, out + tokens * heads * group * dim, 0.f);

  parallel_for(call, tiles.size() * heads, [&](int64_t i) {
    const Tile tile = tiles[i / heads];
    const int64_t head = i % heads, count = (tile.end - tile.begin) * group;
    const int32_t* table = data<int32_t>(tables) + tile.row * width;
    // Keys from the page of the oldest that the tile sees; scores [count, padded].
    const int64_t last = tile.position + tile.end - tile.begin;
    const int64_t origin = std::max<int64_t>(0, tile.position - window + 1) / cache.size * cache.size;
    const int64_t padded = (last - origin + kLanes - 1) / kLanes * kLanes;
    static thread_local std::vector<float> queries, scores, values;
    queries.resize(count * dim);
    scores.resize(count * padded);
    values.assign(count * dim, 0.f);
    for (int64_t m = 0; m < count; m++) {
      const float* from = in + (((tile.begin + m / group) * heads + head) * group + m % group) * dim;
      for (int64_t d = 0; d < dim; d++) queries[m * dim + d] = from[d] * scale;
    }
    for (int64_t s = origin; s < last; s += cache.size) {
      const float* key = cache.key(table[s / cache.size], 0, head);
      const float* next = s + cache.size < last ? cache.key(table[s / cache.size + 1], 0, head)
                                                : cache.value(table[origin / cache.size], head);
      multiply_rows(queries.data(), key, &scores[s - origin], count, std::min(cache.size, last - s), dim, dim, padded,
                    kMany, next);
    }
    for (int64_t m = 0; m < count; m++) {
      int64_t end = tile.position + m / group + 1, first = std::max<int64_t>(0, end - window);
      softmax(&scores[m * padded], std::max<int64_t>(first - origin, 0), end - origin, padded);
    }
    for (int64_t s = origin; s < last; s += cache.size) {
      const float* value = cache.value(table[s / cache.size], head);
      const float* next = s + cache.size < last ? cache.value(table[s / cache.size + 1], head) : value;
      int64_t some = std::min(cache.size, last - s), m = 0;
      for (; m + 3 <= count; m += 3)
        mix<3>(&scores[m * padded + s - origin], padded, value, some, &values[m * dim], dim, next);
      for (; m < count; m++)
        mix<1>(&scores[m * padded + s - origin], padded, value, some, &values[m * dim], dim, next);
    }
    for (int64_t m = 0; m < count; m++)
      std::copy_n(&values[m * dim], dim, out + (((tile.begin + m / group) * heads + head) * group + m % group) * dim);
  });
}
DEFINE_HANDLER(PagedAttention, paged_attention, kF32, kF32, kS32, kS32, kS32)

// Writes nothing: a large result stays memory that the system has promised and not handed out yet.
static void untouched(const Call&) {}
DEFINE_HANDLER(Untouched, untouched)
