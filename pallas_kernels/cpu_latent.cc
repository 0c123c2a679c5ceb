// Multi-head latent attention on CPU (latent_attention/reference.py says what it is), and the write of new latents.
//
// A tile of queries, heads of one token or of several, goes over the row's cached tokens in blocks, with a running softmax
// (Milakov & Gimelshein 2018, arXiv:1805.02867). All heads share a token's row, so a block becomes float32 once for the
// tile: by token, as values, and transposed, as keys. Both products run in strips of 6 queries. Sums are in float32, each
// in one order, whatever else is in the tile; blocks begin at multiples of kBlock of the row's own positions.

#include "cpu_heads.h"

constexpr int64_t kBlock = 64;  // cached tokens
constexpr int64_t kRows = 64;   // most queries of a tile
constexpr int64_t kFew = 6;     // fewest, where a row has so many
constexpr int kTall = 6, kWide = kRegisters == 32 ? 4 : 2;
constexpr int64_t kColumns = kWide * kWidth;
constexpr float kMasked = -1e30f;

static inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// The products.

// y[m, i] += sum over k < count of weights[m, k] * rows[k, i], for i in D registers and M rows y; not added to what was
// there if `fresh`.
template <int M, int D>
static void multiply(const float* weights, int64_t weights_row, const float* rows, int64_t row, int64_t count, bool fresh,
                     float* y, int64_t y_row) {
  Reg sums[M][D];
  for (int m = 0; m < M; m++)
    for (int i = 0; i < D; i++) sums[m][i] = fresh ? Reg{} : reg(y + m * y_row + i * kWidth);
  for (int64_t k = 0; k < count; k++, rows += row) {
    Reg right[D];
    for (int i = 0; i < D; i++) keep(right[i] = reg(rows + i * kWidth));
    for (int m = 0; m < M; m++)
      for (int i = 0; i < D; i++) sums[m][i] += weights[m * weights_row + k] * right[i];
  }
  for (int m = 0; m < M; m++)
    for (int i = 0; i < D; i++) reg(y + m * y_row + i * kWidth) = sums[m][i];
}

// The same for up to M rows y, in D registers.
template <int D, int M = kTall>
static void multiply_strip(int64_t height, const float* weights, int64_t weights_row, const float* rows, int64_t row,
                           int64_t count, bool fresh, float* y, int64_t y_row) {
  if constexpr (M > 1)
    if (height < M) return multiply_strip<D, M - 1>(height, weights, weights_row, rows, row, count, fresh, y, y_row);
  multiply<M, D>(weights, weights_row, rows, row, count, fresh, y, y_row);
}

// A running softmax takes in a block: of its scores [count], a multiple of kWidth, those before `end` become weights, the
// others 0. Returns what earlier weighted values are to be multiplied with.
static float take_in(float* scores, int64_t end, int64_t count, float& peak, float& total) {
  std::fill(scores + end, scores + count, kMasked);
  Reg highest = reg(scores);
  for (int64_t s = kWidth; s < count; s += kWidth) highest = reg(scores + s) > highest ? reg(scores + s) : highest;
  const float before = peak;
  peak = std::max(peak, highest_of(highest));
  Reg sums = {};
  for (int64_t s = 0; s < count; s += kWidth) {
    reg(scores + s) = exp_of(reg(scores + s) - peak);
    if (s + kWidth > end) std::fill(scores + std::max(s, end), scores + s + kWidth, 0.f);
    sums += reg(scores + s);
  }
  const float keep = before == peak ? 1 : exp_of(Reg{} + (before - peak))[0];
  total = total * keep + sum_of(sums);
  return keep;
}

// A tile.

struct Problem {
  const Array *q, *pages, *scales, *tables, *out;
  int64_t heads, rank, rope, values, width;  // values: rank, to a multiple of kWidth; width: with rope, to one too
  int64_t page_size, page_width, page_table, first_page;
  float scale;
};

struct Tile {  // queries [begin, end) of a row, numbered by token and head; the row's query 0 is at `position`
  int64_t row, begin, end, position, first;  // first: the row's query 0 in the batch
};

// A block of cached tokens as float32: `rows` [kBlock, width] by token, the latent, then the key, zeros behind each; and
// `panel`, the same transposed in pieces of kColumns tokens [pieces, width, kColumns], zeros for tokens beyond `count`.
template <class E>
static void widen(const Problem& p, const Tile& tile, int64_t begin, int64_t count, float* rows, float* panel) {
  const int32_t* table = data<int32_t>(*p.tables) + tile.row * p.page_table;
  const float* scales = element_count(*p.scales) ? data<float>(*p.scales) : nullptr;
  for (int64_t s = 0; s < count; s++) {
    const int64_t page = p.first_page + table[(begin + s) / p.page_size], offset = (begin + s) % p.page_size;
    const typename E::Stored* from = data<typename E::Stored>(*p.pages) + (page * p.page_size + offset) * p.page_width;
    const float* own = scales ? scales + 2 * page * p.page_size + offset : nullptr;
    const float latent = own ? own[0] * E::kUnit : E::kUnit, key = own ? own[p.page_size] * E::kUnit : E::kUnit;
    float* to = rows + s * p.width;
    for (int64_t d = 0; d < p.rank; d += kWidth) reg(to + d) = load_some<E>(from + d, p.rank - d) * latent;
    for (int64_t d = 0; d < p.rope; d += kWidth)
      reg(to + p.values + d) = load_some<E>(from + p.rank + d, p.rope - d) * key;
  }
  const int64_t padded = round_up(count, kWidth);
  std::fill(rows + count * p.width, rows + padded * p.width, 0.f);
  for (int64_t s = 0; s < padded; s += kWidth) {
    float* to = panel + s / kColumns * kColumns * p.width + s % kColumns;
    for (int64_t d = 0; d < p.width; d += kWidth) {
      Reg block[kWidth];
      for (int i = 0; i < kWidth; i++) block[i] = reg(rows + (s + i) * p.width + d);
      transpose(block);
      for (int i = 0; i < kWidth; i++) reg(to + (d + i) * kColumns) = block[i];
    }
  }
}

struct Queries {  // of a tile, and what has come of them
  int64_t count;
  float *in, *scores, *out;  // [count, width], [count, kBlock], [count, values]
  float *peaks, *totals;     // [count]
};

// The scores of a strip of queries with the first `seen` tokens of a block.
static void score(const Problem& p, const Queries& queries, int64_t m, int64_t height, int64_t seen, const float* panel) {
  const float* in = queries.in + m * p.width;
  float* to = queries.scores + m * kBlock;
  for (int64_t s = 0; s < seen; s += kColumns) {
    const float* rows = panel + s * p.width;
    if (seen - s > kColumns - kWidth)
      multiply_strip<kWide>(height, in, p.width, rows, kColumns, p.width, true, to + s, kBlock);
    else
      for (int64_t i = 0; s + i < seen; i += kWidth)
        multiply_strip<1>(height, in, p.width, rows + i, kColumns, p.width, true, to + s + i, kBlock);
  }
}

// Adds a strip's weighted values.
static void weigh(const Problem& p, const Queries& queries, int64_t m, int64_t height, int64_t seen, const float* rows) {
  const float* weights = queries.scores + m * kBlock;
  float* to = queries.out + m * p.values;
  int64_t d = 0;
  for (; d + kColumns <= p.values; d += kColumns)
    multiply_strip<kWide>(height, weights, kBlock, rows + d, p.width, seen, false, to + d, p.values);
  for (; d < p.values; d += kWidth)
    multiply_strip<1>(height, weights, kBlock, rows + d, p.width, seen, false, to + d, p.values);
}

template <class E>
static void attend(const Problem& p, const Tile& tile, const Queries& queries) {
  static thread_local std::vector<float> rows, panel;
  rows.assign(kBlock * p.width, 0.f), panel.resize(round_up(kBlock, kColumns) * p.width);
  const auto limit = [&](int64_t m) { return tile.position + (tile.begin + m) / p.heads + 1; };  // tokens that it sees
  const int64_t last = limit(queries.count - 1), strips = (queries.count + kTall - 1) / kTall;
  for (int64_t begin = 0; begin < last; begin += kBlock) {
    const int64_t count = std::min(kBlock, last - begin);
    widen<E>(p, tile, begin, count, rows.data(), panel.data());
    for (int64_t m = 0, left = strips, height; left; left--, m += height) {
      height = (queries.count - m) / left;
      const int64_t seen = std::min(count, limit(m + height - 1) - begin);
      if (seen <= 0) continue;
      score(p, queries, m, height, seen, panel.data());
      for (int64_t i = m; i < m + height; i++) {
        const int64_t end = std::clamp<int64_t>(limit(i) - begin, 0, count);
        float* scores = queries.scores + i * kBlock;
        if (!end) {
          std::fill(scores, scores + seen, 0.f);
          continue;
        }
        const float keep = take_in(scores, end, round_up(seen, kWidth), queries.peaks[i], queries.totals[i]);
        if (keep != 1)
          for (int64_t d = 0; d < p.values; d += kWidth) reg(queries.out + i * p.values + d) *= keep;
      }
      weigh(p, queries, m, height, seen, rows.data());
    }
  }
}

// One tile from its queries to its results.
static void run_tile(const Problem& p, const Tile& tile) {
  const int64_t count = tile.end - tile.begin, first = tile.first + tile.begin, dim = p.rank + p.rope;
  static thread_local std::vector<float> floats;
  floats.assign(count * (p.width + kBlock + p.values + 2), 0.f);
  float *in = floats.data(), *scores = in + count * p.width, *out = scores + count * kBlock, *peaks = out + count * p.values;
  const Queries queries{count, in, scores, out, peaks, peaks + count};
  std::fill_n(peaks, count, kMasked);
  with_element(p.q->dtype, [&](auto element) {
    using E = decltype(element);
    for (int64_t m = 0; m < count; m++) {
      const typename E::Stored* from = data<typename E::Stored>(*p.q) + (first + m) * dim;
      float* to = in + m * p.width;
      for (int64_t d = 0; d < p.rank; d += kWidth) reg(to + d) = load_some<E>(from + d, p.rank - d) * p.scale;
      for (int64_t d = 0; d < p.rope; d += kWidth)
        reg(to + p.values + d) = load_some<E>(from + p.rank + d, p.rope - d) * p.scale;
    }
  });
  with_element(p.pages->dtype, [&](auto element) { attend<decltype(element)>(p, tile, queries); });
  with_element(p.q->dtype, [&](auto element) {
    using E = decltype(element);
    for (int64_t m = 0; m < count; m++) {
      const float norm = queries.totals[m] > 0 ? 1 / queries.totals[m] : 0;
      typename E::Stored* to = data<typename E::Stored>(*p.out) + (first + m) * p.rank;
      for (int64_t d = 0; d < p.rank; d += kWidth)
        store_some<E>(reg(out + m * p.values + d) * norm, to + d, p.rank - d);
    }
  });
}

// q [tokens, heads, rank + rope]; pages [pages, page_size, at least rank + rope], their scales [pages, 2, page_size] or
// nothing; tables [rows, most pages]; where each row's tokens begin [rows + 1]; its cached tokens [rows]; the page from
// which the tables count. The result is [tokens, heads, rank].
static void latent_attention(const Call& call) {
  const Array &q = call.argument(0), &pages = call.argument(1), &tables = call.argument(3);
  Problem p{&q, &pages, &call.argument(2), &tables, &call.result()};
  p.heads = q.dims[1], p.rank = call.result().dims[2], p.rope = q.dims[2] - p.rank;
  p.values = round_up(p.rank, kWidth), p.width = p.values + round_up(p.rope, kWidth);
  p.page_size = pages.dims[1], p.page_width = pages.dims[2], p.page_table = tables.dims[1];
  p.first_page = *data<int32_t>(call.argument(6)), p.scale = call.attribute<float>("scale");
  const int64_t rows = call.argument(5).dims[0], threads = call.num_threads();
  const int32_t *starts = data<int32_t>(call.argument(4)), *lengths = data<int32_t>(call.argument(5));
  // With few queries, tiles are smaller, so that all threads have one.
  const int64_t some = std::clamp((starts[rows] * p.heads + threads - 1) / threads, kFew, kRows);
  std::vector<Tile> tiles;
  for (int64_t row = 0; row < rows; row++) {
    const int64_t tokens = starts[row + 1] - starts[row], queries = tokens * p.heads;
    for (int64_t begin = 0; begin < queries; begin += some)
      tiles.push_back({row, begin, std::min(begin + some, queries), lengths[row] - tokens, starts[row] * p.heads});
  }
  const int64_t token = p.heads * p.rank * (q.dtype == XLA_FFI_DataType_F32 ? 4 : 2);
  std::memset(data<char>(call.result()) + starts[rows] * token, 0, (q.dims[0] - starts[rows]) * token);
  parallel_for(call, tiles.size(), [&](int64_t i) { run_tile(p, tiles[i]); });
}
DEFINE_HANDLER(LatentAttention, latent_attention, kAny, kAny, kF32, kS32, kS32, kS32, kS32)

// Pages and their scales, which the results are in the same memory; rows [tokens, rank + rope]; slots [tokens], -1 for
// padding; the page from which they count.
static void write_latent(const Call& call) {
  const Array &pages = call.result(0), &scales = call.result(1), &rows = call.argument(2);
  const int64_t tokens = rows.dims[0], dim = rows.dims[1], rank = call.attribute<int64_t>("rank");
  const int64_t first_page = *data<int32_t>(call.argument(4)), size = pages.dims[1], width = pages.dims[2];
  const int32_t* slots = data<int32_t>(call.argument(3));
  const int64_t some = std::max<int64_t>(1, (1 << 14) / dim);
  with_element(pages.dtype, [&](auto target) {
    with_element(rows.dtype, [&](auto source) {
      using To = decltype(target);
      using From = decltype(source);
      parallel_for(call, (tokens + some - 1) / some, [&](int64_t piece) {
        for (int64_t t = piece * some; t < std::min(tokens, (piece + 1) * some); t++) {
          if (slots[t] < 0) continue;
          const int64_t page = first_page + slots[t] / size, offset = slots[t] % size;
          const typename From::Stored* from = data<typename From::Stored>(rows) + t * dim;
          typename To::Stored* to = data<typename To::Stored>(pages) + (page * size + offset) * width;
          float* scale = element_count(scales) ? data<float>(scales) + 2 * page * size + offset : nullptr;
          write_head<From, To>(from, rank, to, rank, scale);
          write_head<From, To>(from + rank, dim - rank, to + rank, width - rank, scale ? scale + size : nullptr);
        }
      });
    });
  });
}
DEFINE_HANDLER(WriteLatent, write_latent, kAny, kF32, kAny, kS32, kS32)
