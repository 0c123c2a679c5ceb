// Matmul and paged attention on CPU, called by XLA through its foreign function interface; float32.

#include "cpu_kernels.h"

// y = x w^T for the first `count` rows of x [tokens, in], and w [out, in]; the other rows of y are left as they are.
static void matmul(const Call& call) {
  const Array &x = call.argument(0), &w = call.argument(1), &count = call.argument(2);
  const int64_t tokens = std::min<int64_t>(x.dims[0], *data<int32_t>(count)), in = x.dims[1], out = w.dims[0];
  if (tokens <= 0) return;
  const float *xs = data<float>(x), *ws = data<float>(w);
  float* ys = data<float>(call.result());
  parallel_for(call, (out + kPiece - 1) / kPiece, [=](int64_t piece) {
    const int64_t n = piece * kPiece;
    constexpr int64_t kMany = 16;
    multiply_rows(xs, ws + n * in, ys + n, tokens, std::min(kPiece, out - n), in, in, out, kMany);
  });
}
DEFINE_HANDLER(Matmul, matmul, kF32, kF32, kS32)

// y = x / sqrt(mean(x^2) + eps) * scale, for each row of x [.., size].
static void rms_norm(const Call& call) {
  const Array &x = call.argument(0), &scale = call.argument(1);
  const int64_t size = scale.dims[0], rows = element_count(x) / size;
  const float *xs = data<float>(x), *scales = data<float>(scale), eps = call.attribute<float>("eps");
  float* ys = data<float>(call.result());
  constexpr int64_t kPiece = 32;
  parallel_for(call, (rows + kPiece - 1) / kPiece, [=](int64_t piece) {
    for (int64_t row = piece * kPiece; row < std::min(rows, (piece + 1) * kPiece); row++) {
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
DEFINE_HANDLER(RmsNorm, rms_norm, kF32, kF32)

// Paged attention.

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

struct Pages {
  const float* data;  // [pages, 2 (key, value), heads, size, dim]
  int64_t heads, size, dim;
  const float* key(int32_t page, int64_t offset, int64_t head) const {
    return data + ((page * 2 * heads + head) * size + offset) * dim;
  }
  const float* value(int32_t page, int64_t head) const { return key(page, 0, heads + head); }
};

// y[m] += sum over s of weights[m, s] * values[s], for M rows y [dim] and `count` rows of values, `row` apart.
template <int M>
static void mix(const float* weights, int64_t stride, const float* values, int64_t row, int64_t count, float* y,
                int64_t dim) {
  for (int64_t d = 0; d < dim; d += kLanes) {
    Vec sums[M];
    for (int m = 0; m < M; m++) sums[m] = at(y + m * dim + d);
    for (int64_t s = 0; s < count; s++)
      for (int m = 0; m < M; m++) sums[m] += weights[m * stride + s] * at(values + s * row + d);
    for (int m = 0; m < M; m++) at(y + m * dim + d) = sums[m];
  }
}

static void softmax(float* scores, int64_t first, int64_t end, int64_t padded) {
  std::fill(scores, scores + first, -INFINITY);
  std::fill(scores + end, scores + padded, -INFINITY);
  float peak = *std::max_element(scores + first, scores + end);
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
    for (int64_t s = origin; s < last;) {
      const float* key = cache.key(table[s / cache.size], s % cache.size, head);
      bool four = s + 4 <= last;
      (four ? dot<4> : dot<1>)(queries.data(), key, &scores[s - origin], count, dim, dim, padded);
      s += four ? 4 : 1;
    }
    for (int64_t m = 0; m < count; m++) {
      int64_t end = tile.position + m / group + 1, first = std::max<int64_t>(0, end - window);
      softmax(&scores[m * padded], std::max<int64_t>(first - origin, 0), end - origin, padded);
    }
    for (int64_t s = origin; s < last; s += cache.size) {
      const float* value = cache.value(table[s / cache.size], head);
      int64_t some = std::min(cache.size, last - s), m = 0;
      for (; m + 3 <= count; m += 3)
        mix<3>(&scores[m * padded + s - origin], padded, value, dim, some, &values[m * dim], dim);
      for (; m < count; m++)
        mix<1>(&scores[m * padded + s - origin], padded, value, dim, some, &values[m * dim], dim);
    }
    for (int64_t m = 0; m < count; m++)
      std::copy_n(&values[m * dim], dim, out + (((tile.begin + m / group) * heads + head) * group + m % group) * dim);
  });
}
DEFINE_HANDLER(PagedAttention, paged_attention, kF32, kF32, kS32, kS32, kS32)
