// Matmul and paged attention on CPU, called by XLA through its foreign function interface; float32.

#include "cpu_kernels.h"

// y = x w^T for the first `count` rows of x [tokens, in], and w [out, in]; the other rows of y are left as they are.
static ffi::Error matmul(ffi::ThreadPool pool, F32 x, F32 w, S32 count, ffi::Result<F32> y) {
  const int64_t tokens = std::min<int64_t>(x.dimensions()[0], count.typed_data()[0]);
  const int64_t in = x.dimensions()[1], out = w.dimensions()[0];
  if (tokens <= 0) return ffi::Error::Success();
  const float *xs = x.typed_data(), *ws = w.typed_data();
  float* ys = y->typed_data();
  parallel_for(pool, (out + kPiece - 1) / kPiece, [=](int64_t piece) {
    const int64_t n = piece * kPiece;
    constexpr int64_t kMany = 16;
    multiply_rows(xs, ws + n * in, ys + n, tokens, std::min(kPiece, out - n), in, in, out, kMany);
  });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(Matmul, matmul,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Arg<S32>().Ret<F32>());

// y = x / sqrt(mean(x^2) + eps) * scale, for each row of x [.., size].
static ffi::Error rms_norm(ffi::ThreadPool pool, F32 x, F32 scale, ffi::Result<F32> y, float eps) {
  const int64_t size = scale.dimensions()[0], rows = x.element_count() / size;
  const float *xs = x.typed_data(), *scales = scale.typed_data();
  float* ys = y->typed_data();
  constexpr int64_t kPiece = 32;
  parallel_for(pool, (rows + kPiece - 1) / kPiece, [=](int64_t piece) {
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
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(RmsNorm, rms_norm,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Ret<F32>().Attr<float>("eps"));

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

static ffi::Error paged_attention(ffi::ThreadPool pool, F32 q, F32 pages, S32 tables, S32 q_start, S32 kv_len,
                                  ffi::Result<F32> result, float scale, int64_t window) {
  auto shape = q.dimensions();
  const int64_t tokens = shape[0], heads = shape[1], group = shape[2], dim = shape[3];
  const int64_t rows = kv_len.dimensions()[0], width = tables.dimensions()[1];
  const int32_t *starts = q_start.typed_data(), *lengths = kv_len.typed_data();
  const Pages cache{pages.typed_data(), heads, pages.dimensions()[3], dim};
  const float* in = q.typed_data();
  float* out = result->typed_data();

  std::vector<Tile> tiles;
  for (int64_t row = 0; row < rows; row++)
    for (int64_t t = starts[row]; t < starts[row + 1]; t += kTile)
      tiles.push_back({row, t, std::min<int64_t>(t + kTile, starts[row + 1]), lengths[row] - starts[row + 1] + t});
  std::fill(out + starts[rows] * heads * group * dim, out + tokens * heads * group * dim, 0.f);

  parallel_for(pool, tiles.size() * heads, [&](int64_t i) {
    const Tile tile = tiles[i / heads];
    const int64_t head = i % heads, count = (tile.end - tile.begin) * group;
    const int32_t* table = tables.typed_data() + tile.row * width;
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
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(PagedAttention, paged_attention,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Arg<S32>().Arg<S32>()
                                  .Arg<S32>().Ret<F32>().Attr<float>("scale").Attr<int64_t>("window"));
