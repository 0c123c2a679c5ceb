// Paged attention on CPU, called by XLA through its foreign function interface. cpu_heads.h has the operations before
// it.
//
// A tile of queries of one head loops over the cached tokens in blocks, with a running softmax (Milakov & Gimelshein
// 2018, arXiv:1805.02867). Contents of pages become float32 in registers; all sums are float32. Blocks begin at
// multiples of kBlock of the row's own positions, so that a query's result does not depend on other rows. Scores of a
// few queries are summed in another order than those of many, which a row has in a chunk of a prompt. With `one_order`
// all are summed like those of many: a query's result then depends only on the tokens that it sees, bit for bit.

#include <cmath>
#include <vector>

#include "cpu_heads.h"

constexpr int64_t kBlock = 64;  // cached tokens of a block
constexpr int64_t kRows = 64;    // queries of a tile, approximately
constexpr int64_t kAhead = 16;   // how many tokens ahead keys or values are prefetched
constexpr int64_t kMany = 10;    // the default of Problem::many
constexpr float kMasked = -1e30f;

// Products of scores and of values.

// y[m] += sum over s < count of weights[m, s] * rows[s] for M rows y, in D registers of columns from d on.
template <class E, int M, int D>
static void mix_columns(const float* weights, int64_t weights_row, const typename E::Stored* const* rows, int64_t count,
                        int64_t d, float* y, int64_t y_row) {
  Reg sums[M][D];
  for (int m = 0; m < M; m++)
    for (int i = 0; i < D; i++) sums[m][i] = reg(y + m * y_row + d + i * kWidth);
  for (int64_t s = 0; s < count; s++) {
    const typename E::Stored* row = rows[s] + d;
    if (M <= 4)
      for (size_t byte = 0; byte < D * kWidth * sizeof *row; byte += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(rows[s + kAhead] + d) + byte);
    Reg right[D];
    for (int i = 0; i < D; i++) right[i] = kept(E::load(row + i * kWidth));
    for (int m = 0; m < M; m++)
      for (int i = 0; i < D; i++) sums[m][i] = fused(right[i], weights[m * weights_row + s] - Floats{}, sums[m][i]);
  }
  for (int m = 0; m < M; m++)
    for (int i = 0; i < D; i++) reg(y + m * y_row + d + i * kWidth) = sums[m][i];
}

// mix_columns for all `width` columns, a multiple of kWidth. `rows` must have kAhead more entries.
template <class E, int M>
static void mix(const float* weights, int64_t weights_row, const typename E::Stored* const* rows, int64_t count,
                int64_t width, float* y, int64_t y_row) {
  constexpr int kWide = kRegisters == 32 ? 4 : 2;
  int64_t d = 0;
  for (; d + kWide * kWidth <= width; d += kWide * kWidth)
    mix_columns<E, M, kWide>(weights, weights_row, rows, count, d, y, y_row);
  for (; d < width; d += kWidth) mix_columns<E, M, 1>(weights, weights_row, rows, count, d, y, y_row);
}

// `mix` for any number of rows y, in strips of up to kTall.
constexpr int kTall = 6;
template <class E, int M = kTall>
static void mix_strip(int64_t height, const float* weights, int64_t weights_row, const typename E::Stored* const* rows,
                      int64_t count, int64_t width, float* y, int64_t y_row) {
  if constexpr (M > 1)
    if (height < M) return mix_strip<E, M - 1>(height, weights, weights_row, rows, count, width, y, y_row);
  mix<E, M>(weights, weights_row, rows, count, width, y, y_row);
}

// scores[m, s] = queries[m] . keys[s] for M queries and kWidth keys, several keys at a time. Prefetches the keys that
// come kAhead later.
template <class E, int M>
static void dot_keys(const float* queries, int64_t dim, const typename E::Stored* const* keys, float* scores) {
  constexpr int kSums = kRegisters / 2, kSome = kSums / M >= kWidth ? kWidth : kSums / M >= 8 ? 8 : kSums / M >= 4 ? 4 : 2;
  Reg parts[M][kWidth / kSome];
  for (int first = 0; first < kWidth; first += kSome) {
    Reg sums[M][kSome];
    for (auto& some : sums)
      for (Reg& sum : some) sum = Reg{};
    for (int n = 0; n < kSome; n++)
      for (size_t byte = 0; byte < dim * sizeof **keys; byte += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(keys[first + n + kAhead]) + byte);
    for (int64_t d = 0; d < dim; d += kWidth) {
      Reg left[M];
      for (int m = 0; m < M; m++) left[m] = kept(reg(queries + m * dim + d));
      for (int n = 0; n < kSome; n++) {
        const Reg right = E::load(keys[first + n] + d);
        for (int m = 0; m < M; m++) sums[m][n] = fused(left[m], right, sums[m][n]);
      }
    }
    for (int m = 0; m < M; m++) parts[m][first / kSome] = fold<kSome>(sums[m]);
  }
  for (int m = 0; m < M; m++) {
    if constexpr (kSome < kWidth)
      reg(scores + m * kBlock) = fold<kWidth / kSome, kSome>(parts[m]);
    else
      reg(scores + m * kBlock) = parts[m][0];
  }
}

// panel[c, d, j] = keys[c * kColumns + j][d], zeros for d in [dim, width). `mix` takes it as its rows.
constexpr int64_t kColumns = (kRegisters == 32 ? 4 : 2) * kWidth;
template <class E>
static void pack_keys(const typename E::Stored* const* keys, int64_t count, int64_t dim, int64_t width, float* panel) {
  for (int64_t s = 0; s < count; s += kWidth) {
    float* to = panel + s / kColumns * kColumns * width + s % kColumns;
    for (int64_t d = 0; d < width; d += kWidth) {
      Reg block[kWidth];
      for (int i = 0; i < kWidth; i++) block[i] = load_some<E>(keys[s + i] + d, dim - d);
      transpose(block);
      for (int i = 0; i < kWidth; i++) reg(to + (d + i) * kColumns) = block[i];
    }
  }
}

// Softmax.

struct Scoring {
  float softcap;  // 0: none
  const float *key_scale, *value_scale;  // of each cached token of a block; null: no scales
};

// Adds a block to a query's running softmax. Scores [count], a multiple of kWidth, become weights of the values in
// [first, end), and 0 elsewhere. Returns the factor for the values that were added before.
static float take_in(float* scores, int64_t first, int64_t end, int64_t count, const Scoring& how, float& peak,
                     float& total) {
  if (first >= end) {
    std::fill(scores, scores + count, 0.f);
    return 1;
  }
  for (int64_t s = 0; s < count; s += kWidth) {
    Reg x = reg(scores + s);
    if (how.key_scale) x *= reg(how.key_scale + s);
    if (how.softcap) {
      const Reg size = x < 0 ? -x : x, e = exp_of(size * (-2 / how.softcap)), y = how.softcap * (1 - e) / (1 + e);
      x = x < 0 ? -y : y;
    }
    reg(scores + s) = x;
  }
  std::fill(scores, scores + first, kMasked);
  std::fill(scores + end, scores + count, kMasked);
  Reg highest = reg(scores);
  for (int64_t s = kWidth; s < count; s += kWidth) highest = reg(scores + s) > highest ? reg(scores + s) : highest;
  const float before = peak;
  peak = std::max(peak, highest_of(highest));
  Reg sums = {};
  for (int64_t s = 0; s < count; s += kWidth) {
    const Reg weight = exp_of(reg(scores + s) - peak);
    sums += weight;
    reg(scores + s) = how.value_scale ? weight * reg(how.value_scale + s) : weight;
  }
  const float keep = before == peak ? 1 : exp_of(Reg{} + (before - peak))[0];
  total = total * keep + sum_of(sums);
  std::fill(scores, scores + first, 0.f);
  std::fill(scores + end, scores + count, 0.f);
  return keep;
}

// Tiles.

struct Problem {
  const Array *q, *pages, *scales, *tables, *sinks, *out;
  int64_t heads, group, dim, width;  // width: dim rounded up to a multiple of kWidth
  int64_t page_size, page_dim, page_table, first_page, window;
  float scale, softcap;
  int64_t many;  // from this number of queries on, blocks of keys are transposed
};

struct Tile {  // query tokens [begin, end) of a row, for one head; token `begin` is at `position`
  int64_t row, head, begin, end, position;
};

static inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// A block of cached tokens [begin, begin + count). Its rows are `padded` keys (the last key fills the padding), then
// the values, then the kAhead first keys of the next block.
template <class E>
struct Block {
  const typename E::Stored* rows[2 * kBlock + kAhead];
  float key_scale[kBlock], value_scale[kBlock];
  int64_t count, padded;

  Block(const Problem& p, const Tile& tile, int64_t begin, int64_t last) {
    count = std::min(kBlock, last - begin), padded = round_up(count, kWidth);
    const bool scaled = element_count(*p.scales);
    find(p, tile, begin, count, 0, rows, scaled ? key_scale : nullptr);
    find(p, tile, begin, count, 1, rows + padded, scaled ? value_scale : nullptr);
    for (int64_t i = count; i < padded; i++) rows[i] = rows[count - 1], key_scale[i] = value_scale[i] = 0;
    const int64_t next = std::min(kAhead, last - begin - count);
    find(p, tile, begin + count, next, 0, rows + padded + count, nullptr);
    std::fill_n(rows + padded + count + next, kAhead - next, rows[0]);
  }

 private:
  // Finds the addresses of the keys (0) or values (1) of `some` tokens, and their scales, page by page.
  static void find(const Problem& p, const Tile& tile, int64_t begin, int64_t some, int64_t which,
                   const typename E::Stored** rows, float* scale) {
    const int32_t* table = data<int32_t>(*p.tables) + tile.row * p.page_table;
    int64_t page = begin / p.page_size, offset = begin % p.page_size;
    for (int64_t run; some > 0; some -= run, rows += run, page++, offset = 0) {
      run = std::min(some, p.page_size - offset);
      const int64_t first = (((p.first_page + table[page]) * 2 + which) * p.heads + tile.head) * p.page_size + offset;
      const typename E::Stored* from = data<typename E::Stored>(*p.pages) + first * p.page_dim;
      for (int64_t i = 0; i < run; i++) rows[i] = from + i * p.page_dim;
      if (scale) scale = std::copy_n(data<float>(*p.scales) + first, run, scale);
    }
  }
};

struct Queries {  // a tile's queries, token by token, and their results so far
  int64_t count;
  float *in, *scores, *out;             // [count, width], [count, kBlock], [count, width]
  float *peaks, *totals;                // [count]
  int64_t *first, *end;                 // the tokens of the current block that each query sees, [first, end)
};

// Scores of a few queries.
template <class E>
static void score_few(const Queries& queries, const Block<E>& block, int64_t width) {
  for (int64_t m = 0; m < queries.count;) {
    const int64_t height = std::min<int64_t>(queries.count - m, 4);
    const float* in = queries.in + m * width;
    for (int64_t s = 0; s < block.padded; s += kWidth) {
      float* scores = queries.scores + m * kBlock + s;
      if (height == 1) dot_keys<E, 1>(in, width, block.rows + s, scores);
      if (height == 2) dot_keys<E, 2>(in, width, block.rows + s, scores);
      if (height == 3) dot_keys<E, 3>(in, width, block.rows + s, scores);
      if (height == 4) dot_keys<E, 4>(in, width, block.rows + s, scores);
    }
    m += height;
  }
}

// Runs f(first query, height, first, end) for strips of queries. [first, end): the tokens that any of them sees.
template <class F>
static void for_strips(const Queries& queries, F f) {
  for (int64_t m = 0, strips = (queries.count + kTall - 1) / kTall; strips; strips--) {
    const int64_t height = (queries.count - m) / strips;
    if (queries.first[m] < queries.end[m + height - 1])
      f(m, height, std::min(queries.first[m], kBlock - 1), queries.end[m + height - 1]);
    m += height;
  }
}

// Scores of many queries. The keys are transposed to `panel` [padded, width].
template <class E>
static void score_many(const Queries& queries, const Block<E>& block, int64_t dim, int64_t width, float* panel) {
  pack_keys<E>(block.rows, block.padded, dim, width, panel);
  std::fill_n(queries.scores, queries.count * kBlock, 0.f);
  static thread_local std::vector<const float*> rows;
  rows.resize(width + kAhead);
  for (int64_t s = 0; s < block.padded; s += kColumns) {
    for (int64_t d = 0; d < width + kAhead; d++) rows[d] = panel + s * width + std::min(d, width - 1) * kColumns;
    for_strips(queries, [&](int64_t m, int64_t height, int64_t first, int64_t end) {
      const int64_t columns = std::min(kColumns, round_up(end, kWidth) - s);
      if (columns > 0 && first < s + kColumns)
        mix_strip<Float32>(height, queries.in + m * width, width, rows.data(), width, columns,
                           queries.scores + m * kBlock + s, kBlock);
    });
  }
}

// Adds the weighted values. `wide` has values as float32, for many queries and for rows that do not fill registers.
template <class E>
static void weigh(const Queries& queries, const Block<E>& block, int64_t dim, int64_t width, float* wide) {
  const auto add = [&](auto element, auto rows) {
    for_strips(queries, [&](int64_t m, int64_t height, int64_t first, int64_t end) {
      mix_strip<decltype(element)>(height, queries.scores + m * kBlock + first, kBlock, rows + first, end - first, width,
                                   queries.out + m * width, width);
    });
  };
  const auto* const* values = block.rows + block.padded;
  if (dim == width && (queries.count < kMany || std::is_same_v<E, Float32>)) return add(E(), values);
  const float* rows[kBlock + kAhead];
  for (int64_t s = 0; s < block.count; s++) {
    float* to = wide + s * width;
    for (int64_t d = 0; d < width; d += kWidth) reg(to + d) = load_some<E>(values[s] + d, dim - d);
    rows[s] = to;
  }
  std::fill_n(rows + block.count, kAhead, rows[block.count - 1]);
  add(Float32(), rows);
}

template <class E>
static void attend(const Problem& p, const Tile& tile, const Queries& queries) {
  static thread_local std::vector<float> wide;
  wide.resize(kBlock * p.width);
  const int64_t tokens = tile.end - tile.begin, last = tile.position + tokens;
  for (int64_t begin = std::max<int64_t>(0, tile.position - p.window + 1) / kBlock * kBlock; begin < last; begin += kBlock) {
    const Block<E> block(p, tile, begin, last);
    for (int64_t m = 0; m < queries.count; m++) {
      const int64_t end = tile.position + m / p.group + 1;
      queries.end[m] = std::min(std::max<int64_t>(end - begin, 0), block.count);
      queries.first[m] = std::max<int64_t>(end - p.window - begin, 0);
    }
    if (queries.count < p.many && p.dim == p.width)
      score_few(queries, block, p.width);
    else
      score_many(queries, block, p.dim, p.width, wide.data());
    const bool scaled = element_count(*p.scales);
    const Scoring how{p.softcap, scaled ? block.key_scale : nullptr, scaled ? block.value_scale : nullptr};
    for (int64_t m = 0; m < queries.count; m++) {
      const float keep = take_in(queries.scores + m * kBlock, queries.first[m], queries.end[m], block.padded, how,
                                 queries.peaks[m], queries.totals[m]);
      if (keep != 1)
        for (int64_t d = 0; d < p.width; d += kWidth) reg(queries.out + m * p.width + d) *= keep;
    }
    weigh(queries, block, p.dim, p.width, wide.data());
  }
}

// Computes one tile.
static void run_tile(const Problem& p, const Tile& tile) {
  const int64_t count = (tile.end - tile.begin) * p.group, width = p.width;
  static thread_local std::vector<float> floats;
  static thread_local std::vector<int64_t> limits;
  floats.assign(count * (2 * width + kBlock + 2), 0.f), limits.resize(2 * count);
  float *in = floats.data(), *scores = in + count * width, *out = scores + count * kBlock, *peaks = out + count * width;
  const Queries queries{count, in, scores, out, peaks, peaks + count, limits.data(), limits.data() + count};
  std::fill_n(peaks, count, kMasked);
  const auto at = [&](int64_t m) { return (((tile.begin + m / p.group) * p.heads + tile.head) * p.group + m % p.group) * p.dim; };
  const float unit = with_element(p.pages->dtype, [](auto element) { return decltype(element)::kUnit; });
  with_element(p.q->dtype, [&](auto element) {
    using E = decltype(element);
    for (int64_t m = 0; m < count; m++)
      for (int64_t d = 0; d < p.dim; d += kWidth)
        reg(in + m * width + d) = load_some<E>(data<typename E::Stored>(*p.q) + at(m) + d, p.dim - d) * (p.scale * unit);
  });
  with_element(p.pages->dtype, [&](auto element) { attend<decltype(element)>(p, tile, queries); });
  const float* sinks = element_count(*p.sinks) ? data<float>(*p.sinks) + tile.head * p.group : nullptr;
  with_element(p.q->dtype, [&](auto element) {
    using E = decltype(element);
    for (int64_t m = 0; m < count; m++) {
      float norm = unit / queries.totals[m];
      if (sinks) {
        const float peak = std::max(peaks[m], sinks[m % p.group]), keep = std::exp(peaks[m] - peak);
        norm = unit * keep / (queries.totals[m] * keep + std::exp(sinks[m % p.group] - peak));
      }
      for (int64_t d = 0; d < p.dim; d += kWidth)
        store_some<E>(reg(out + m * width + d) * norm, data<typename E::Stored>(*p.out) + at(m) + d, p.dim - d);
    }
  });
}

// Arguments: q [tokens, heads, group, dim]; pages [pages, 2, heads, page_size, at least dim]; their scales or an empty
// array; block tables [rows, most pages]; the begin of each row's tokens [rows + 1]; its cached tokens [rows]; the page
// from which the tables count; sinks [heads, group] or an empty array. See paged_attention/reference.py.
static void paged_attention(const Call& call) {
  const Array &q = call.argument(0), &pages = call.argument(1), &tables = call.argument(3);
  Problem p{&q, &pages, &call.argument(2), &tables, &call.argument(7), &call.result()};
  p.heads = q.dims[1], p.group = q.dims[2], p.dim = q.dims[3], p.width = round_up(p.dim, kWidth);
  p.page_size = pages.dims[3], p.page_dim = pages.dims[4], p.page_table = tables.dims[1];
  p.first_page = *data<int32_t>(call.argument(6)), p.window = call.attribute<int64_t>("window");
  p.scale = call.attribute<float>("scale"), p.softcap = call.attribute<float>("softcap");
  p.many = call.attribute<bool>("one_order") ? 0 : kMany;
  const int64_t rows = call.argument(5).dims[0], some = std::max<int64_t>(1, kRows / p.group);
  const int32_t *starts = data<int32_t>(call.argument(4)), *lengths = data<int32_t>(call.argument(5));
  if (kChecked)
    check_rows(tables, starts, lengths, rows, q.dims[0], p.first_page, pages.dims[0], p.page_size, p.window, kBlock);
  std::vector<Tile> tiles;
  for (int64_t row = 0; row < rows; row++)
    for (int64_t head = 0; head < p.heads; head++)
      for (int64_t t = starts[row]; t < starts[row + 1]; t += some)
        tiles.push_back({row, head, t, std::min<int64_t>(t + some, starts[row + 1]), lengths[row] - starts[row + 1] + t});
  const int64_t token = p.heads * p.group * p.dim * (q.dtype == XLA_FFI_DataType_F32 ? 4 : 2);
  std::memset(data<char>(call.result()) + starts[rows] * token, 0, (q.dims[0] - starts[rows]) * token);
  parallel_for(call, tiles.size(), [&](int64_t i) { run_tile(p, tiles[i]); });
}
DEFINE_HANDLER(PagedAttention, paged_attention, kAny, kAny, kF32, kS32, kS32, kS32, kS32, kF32)

#include "cpu_segments.h"
