// Multi-head latent attention on CPU (latent_attention/reference.py defines it), and the write of new latents.
//
// A tile is queries of one row: heads of one token or of several. It goes over the row's cached tokens in blocks, with
// a running softmax (Milakov & Gimelshein 2018, arXiv:1805.02867). All heads share a token's row of the cache, so a
// block is converted to float32 once per tile: by token, as values, and transposed, as keys. Both products run in
// strips of 6 queries. Sums are in float32.
//
// Blocks and parts begin at multiples of kBlock and kPart of the row's own positions. A query's parts are joined in
// their order, whether one thread computes them all or several threads share them. So a query's result has the same
// bits, whatever else is in its tile or in the batch.

#include "cpu_heads.h"
#include "cpu_strips.h"

constexpr int64_t kBlock = 64;  // cached tokens
constexpr int64_t kPart = 512;  // cached tokens of a part, whose softmax is then joined with the parts before
constexpr int64_t kRows = 64;   // most queries of a tile
constexpr int64_t kFew = 6;     // fewest queries of a tile, if the row has that many
constexpr float kMasked = -1e30f;

// Adds a block to a running softmax. Of its scores [count], a multiple of kWidth, those before `end` become weights,
// and the others become 0. Returns the factor of earlier weighted values.
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
  int64_t heads, rank, rope, values, width;  // values: rank, width: rank + rope; both rounded up to kWidth
  int64_t page_size, page_width, page_table, first_page;
  float scale;
};

struct Tile {  // queries [begin, end) of a row, numbered by token and head; the row's query 0 is at `position`
  int64_t row, begin, end, position, first;  // first: the row's query 0 in the batch
};

// A block of cached tokens as float32. `rows` [kBlock, width] is by token: the latent, then the key, each padded with
// zeros. `panel` is the same transposed, in pieces of kColumns tokens [pieces, width, kColumns], with zeros for tokens
// beyond `count`.
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

// The running softmax of a tile's queries [count]: weighted values [count, values], peaks and totals [count].
struct Result {
  float *out, *peaks, *totals;

  static int64_t size(const Problem& p, int64_t count) { return count * (p.values + 2); }
  static Result in(float* room, const Problem& p, int64_t count) {
    return {room, room + count * p.values, room + count * (p.values + 1)};
  }
};

struct Queries {  // a tile's queries: in [count, width], scores [count, kBlock]
  int64_t count;
  float *in, *scores;
  Result result;
};

// The scores of a strip of queries with the first `seen` tokens of a block.
static void score(const Problem& p, const Queries& queries, int64_t m, int64_t height, int64_t seen, const float* panel) {
  const float* in = queries.in + m * p.width;
  float* to = queries.scores + m * kBlock;
  for (int64_t s = 0; s < seen; s += kColumns) {
    const float* rows = panel + s * p.width;
    if (seen - s > kColumns - kWidth)
      multiply_strip<kWide>(height, in, p.width, 1, rows, kColumns, p.width, 0, to + s, kBlock);
    else
      for (int64_t i = 0; s + i < seen; i += kWidth)
        multiply_strip<1>(height, in, p.width, 1, rows + i, kColumns, p.width, 0, to + s + i, kBlock);
  }
}

// Adds a strip's weighted values.
static void weigh(const Problem& p, const Queries& queries, int64_t m, int64_t height, int64_t seen, const float* rows) {
  const float* weights = queries.scores + m * kBlock;
  float* to = queries.result.out + m * p.values;
  int64_t d = 0;
  for (; d + kColumns <= p.values; d += kColumns)
    multiply_strip<kWide>(height, weights, kBlock, 1, rows + d, p.width, seen, 1, to + d, p.values);
  for (; d < p.values; d += kWidth)
    multiply_strip<1>(height, weights, kBlock, 1, rows + d, p.width, seen, 1, to + d, p.values);
}

// The number of cached tokens that query m of a tile sees.
static int64_t limit(const Problem& p, const Tile& tile, int64_t m) {
  return tile.position + (tile.begin + m) / p.heads + 1;
}

// How many parts the tile's last query has.
static int64_t parts_of(const Problem& p, const Tile& tile) {
  return std::max<int64_t>(1, (limit(p, tile, tile.end - tile.begin - 1) + kPart - 1) / kPart);
}

// Computes one part of the cached tokens, with a softmax of its own.
template <class E>
static void attend(const Problem& p, const Tile& tile, const Queries& queries, int64_t part) {
  static thread_local std::vector<float> rows, panel;
  rows.assign(kBlock * p.width, 0.f), panel.resize(round_up(kBlock, kColumns) * p.width);
  const Result& result = queries.result;
  std::fill_n(result.out, Result::size(p, queries.count), 0.f);
  std::fill_n(result.peaks, queries.count, kMasked);
  const int64_t last = std::min(limit(p, tile, queries.count - 1), (part + 1) * kPart);
  const int64_t strips = (queries.count + kTall - 1) / kTall;
  for (int64_t begin = part * kPart; begin < last; begin += kBlock) {
    const int64_t count = std::min(kBlock, last - begin);
    widen<E>(p, tile, begin, count, rows.data(), panel.data());
    for (int64_t m = 0, left = strips, height; left; left--, m += height) {
      height = (queries.count - m) / left;
      const int64_t seen = std::min(count, limit(p, tile, m + height - 1) - begin);
      if (seen <= 0) continue;
      score(p, queries, m, height, seen, panel.data());
      for (int64_t i = m; i < m + height; i++) {
        const int64_t end = std::clamp<int64_t>(limit(p, tile, i) - begin, 0, count);
        float* scores = queries.scores + i * kBlock;
        if (!end) {
          std::fill(scores, scores + seen, 0.f);
          continue;
        }
        const float keep = take_in(scores, end, round_up(seen, kWidth), result.peaks[i], result.totals[i]);
        if (keep != 1)
          for (int64_t d = 0; d < p.values; d += kWidth) reg(result.out + i * p.values + d) *= keep;
      }
      weigh(p, queries, m, height, seen, rows.data());
    }
  }
}

// Joins a part with the parts before it. It is not inlined, so that it rounds in the same way for all callers.
__attribute__((noinline)) static void join(const Problem& p, int64_t count, const Result& all, const Result& part) {
  for (int64_t m = 0; m < count; m++) {
    const float peak = std::max(all.peaks[m], part.peaks[m]);
    const Reg before = exp_of(Reg{} + (all.peaks[m] - peak)), now = exp_of(Reg{} + (part.peaks[m] - peak));
    all.peaks[m] = peak, all.totals[m] = all.totals[m] * before[0] + part.totals[m] * now[0];
    float *to = all.out + m * p.values, *from = part.out + m * p.values;
    for (int64_t d = 0; d < p.values; d += kWidth) reg(to + d) = reg(to + d) * before + reg(from + d) * now;
  }
}

// Computes the parts [first, end) of a tile and joins them in `all`.
static void run_parts(const Problem& p, const Tile& tile, int64_t first, int64_t end, const Result& all) {
  const int64_t count = tile.end - tile.begin, dim = p.rank + p.rope;
  static thread_local std::vector<float> floats;
  floats.assign(count * (p.width + kBlock) + Result::size(p, count), 0.f);
  float *in = floats.data(), *scores = in + count * p.width;
  const Result part = Result::in(scores + count * kBlock, p, count);
  with_element(p.q->dtype, [&](auto element) {
    using E = decltype(element);
    for (int64_t m = 0; m < count; m++) {
      const typename E::Stored* from = data<typename E::Stored>(*p.q) + (tile.first + tile.begin + m) * dim;
      float* to = in + m * p.width;
      for (int64_t d = 0; d < p.rank; d += kWidth) reg(to + d) = load_some<E>(from + d, p.rank - d) * p.scale;
      for (int64_t d = 0; d < p.rope; d += kWidth)
        reg(to + p.values + d) = load_some<E>(from + p.rank + d, p.rope - d) * p.scale;
    }
  });
  with_element(p.pages->dtype, [&](auto element) {
    for (int64_t i = first; i < end; i++) {
      attend<decltype(element)>(p, tile, {count, in, scores, i == first ? all : part}, i);
      if (i > first) join(p, count, all, part);
    }
  });
}

// Stores the results of a tile.
static void finish(const Problem& p, const Tile& tile, const Result& result) {
  with_element(p.q->dtype, [&](auto element) {
    using E = decltype(element);
    for (int64_t m = 0; m < tile.end - tile.begin; m++) {
      const float norm = result.totals[m] > 0 ? 1 / result.totals[m] : 0;
      typename E::Stored* to = data<typename E::Stored>(*p.out) + (tile.first + tile.begin + m) * p.rank;
      for (int64_t d = 0; d < p.rank; d += kWidth)
        store_some<E>(reg(result.out + m * p.values + d) * norm, to + d, p.rank - d);
    }
  });
}

// Computes all tiles, each by one thread.
static void run_whole(const Call& call, const Problem& p, const std::vector<Tile>& tiles) {
  parallel_for(call, tiles.size(), [&](int64_t i) {
    static thread_local std::vector<float> room;
    const int64_t count = tiles[i].end - tiles[i].begin;
    room.resize(Result::size(p, count));
    const Result all = Result::in(room.data(), p, count);
    run_parts(p, tiles[i], 0, parts_of(p, tiles[i]), all);
    finish(p, tiles[i], all);
  });
}

// Computes all tiles; threads share the parts of a tile.
static void run_shared(const Call& call, const Problem& p, const std::vector<Tile>& tiles) {
  struct Item {
    int64_t tile, part;
  };
  std::vector<Item> items;
  std::vector<int64_t> first;
  for (size_t i = 0; i < tiles.size(); i++) {
    first.push_back(items.size());
    for (int64_t part = 0; part < parts_of(p, tiles[i]); part++) items.push_back({static_cast<int64_t>(i), part});
  }
  const int64_t each = Result::size(p, kRows);
  std::vector<float> room(items.size() * each);
  const auto result = [&](int64_t item, const Tile& tile) {
    return Result::in(room.data() + item * each, p, tile.end - tile.begin);
  };
  parallel_for(call, items.size(), [&](int64_t i) {
    const Tile& tile = tiles[items[i].tile];
    run_parts(p, tile, items[i].part, items[i].part + 1, result(i, tile));
  });
  parallel_for(call, tiles.size(), [&](int64_t i) {
    const Tile& tile = tiles[i];
    for (int64_t part = 1; part < parts_of(p, tile); part++)
      join(p, tile.end - tile.begin, result(first[i], tile), result(first[i] + part, tile));
    finish(p, tile, result(first[i], tile));
  });
}

// Cuts a batch's queries into tiles of up to `some` queries, and counts their parts.
static std::vector<Tile> cut(const Problem& p, const int32_t* starts, const int32_t* lengths, int64_t rows, int64_t some,
                             int64_t* parts) {
  std::vector<Tile> tiles;
  *parts = 0;
  for (int64_t row = 0; row < rows; row++) {
    const int64_t tokens = starts[row + 1] - starts[row], queries = tokens * p.heads;
    for (int64_t begin = 0; begin < queries; begin += some) {
      tiles.push_back({row, begin, std::min(begin + some, queries), lengths[row] - tokens, starts[row] * p.heads});
      *parts += parts_of(p, tiles.back());
    }
  }
  return tiles;
}

// Arguments: q [tokens, heads, rank + rope]; pages [pages, page_size, at least rank + rope]; their scales [pages, 2,
// page_size] or an empty array; tables [rows, most pages]; the beginning of each row's tokens [rows + 1]; each row's
// number of cached tokens [rows]; the page from which the tables count. The result is [tokens, heads, rank].
static void latent_attention(const Call& call) {
  const Array &q = call.argument(0), &pages = call.argument(1), &tables = call.argument(3);
  Problem p{&q, &pages, &call.argument(2), &tables, &call.result()};
  p.heads = q.dims[1], p.rank = call.result().dims[2], p.rope = q.dims[2] - p.rank;
  p.values = round_up(p.rank, kWidth), p.width = p.values + round_up(p.rope, kWidth);
  p.page_size = pages.dims[1], p.page_width = pages.dims[2], p.page_table = tables.dims[1];
  p.first_page = *data<int32_t>(call.argument(6)), p.scale = call.attribute<float>("scale");
  const int64_t rows = call.argument(5).dims[0], threads = call.num_threads();
  const int32_t *starts = data<int32_t>(call.argument(4)), *lengths = data<int32_t>(call.argument(5));
  if (kChecked)
    check_rows(tables, starts, lengths, rows, q.dims[0], p.first_page, pages.dims[0], p.page_size, INT32_MAX, kBlock);
  int64_t parts;
  std::vector<Tile> tiles = cut(p, starts, lengths, rows, kRows, &parts);
  if (parts < 2 * threads && threads > 1) {  // only smaller tiles give all threads work
    const int64_t some = (starts[rows] * p.heads + threads - 1) / threads;
    tiles = cut(p, starts, lengths, rows, std::clamp(some, kFew, kRows), &parts);
  }
  const int64_t token = p.heads * p.rank * (q.dtype == XLA_FFI_DataType_F32 ? 4 : 2);
  std::memset(data<char>(call.result()) + starts[rows] * token, 0, (q.dims[0] - starts[rows]) * token);
  const int64_t count = tiles.size();
  if (count < 2 * threads && parts > count && threads > 1)
    run_shared(call, p, tiles);
  else
    run_whole(call, p, tiles);
}
DEFINE_HANDLER(LatentAttention, latent_attention, kAny, kAny, kF32, kS32, kS32, kS32, kS32)

// Arguments: pages and their scales, which share their memory with the results; rows [tokens, rank + rope]; slots
// [tokens], -1 for padding; the page from which slots count.
static void write_latent(const Call& call) {
  const Array &pages = call.result(0), &scales = call.result(1), &rows = call.argument(2);
  const int64_t tokens = rows.dims[0], dim = rows.dims[1], rank = call.attribute<int64_t>("rank");
  const int64_t first_page = *data<int32_t>(call.argument(4)), size = pages.dims[1], width = pages.dims[2];
  const int32_t* slots = data<int32_t>(call.argument(3));
  if (kChecked) check_slots(slots, tokens, first_page, pages.dims[0], size);
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
