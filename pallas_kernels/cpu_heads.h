// Prepares new tokens' heads for attention: norms of queries and keys, rotary positions, and the write of keys and
// values into the cache's pages.

#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "cpu_registers.h"
#include "cpu_threads.h"

// Runs f(element) with the C++ type for an array's dtype.
template <class F>
static auto with_element(int type, F f) {
  switch (type) {
    case XLA_FFI_DataType_BF16: return f(BFloat16());
    case XLA_FFI_DataType_F16: return f(Float16());
    case XLA_FFI_DataType_S8: return f(Int8());
    case XLA_FFI_DataType_F8E4M3FN: return f(Float8());
    default: return f(Float32());
  }
}

// Writes a head's key or value [dim] to its slot [page_dim] and fills the rest with 0. With `scale`, it writes codes.
template <class From, class To>
static void write_head(const typename From::Stored* from, int64_t dim, typename To::Stored* to, int64_t page_dim,
                       float* scale) {
  float by = 1;
  if (scale) {
    constexpr float largest = std::is_same_v<To, Int8> ? 127 : 448;
    Reg highest = {};
    for (int64_t d = 0; d < dim; d += kWidth) {
      const Reg x = load_some<From>(from + d, dim - d), size = x < 0 ? -x : x;
      highest = size > highest ? size : highest;
    }
    const float peak = highest_of(highest);
    *scale = by = peak > 1e-30f ? peak / largest : 1;  // as `kv_write.TINY`
  }
  int64_t d = 0;
  for (; d < dim; d += kWidth) {
    const Reg x = load_some<From>(from + d, dim - d);
    store_some<To>(scale ? x / by : x, to + d, page_dim - d);
  }
  if (d < page_dim) std::fill(to + d, to + page_dim, 0);
}

// Checks the slots of `tokens` tokens, which count from first_page, in a cache of so many pages.
static void check_slots(const int32_t* slots, int64_t tokens, int64_t first_page, int64_t pages, int64_t page_size) {
  check_index("first_page", first_page, 0, pages);
  for (int64_t t = 0; t < tokens; t++) check_index("slots", slots[t], -1, (pages - first_page) * page_size, t);
}

// Checks what attention reads of its rows: the begin of their tokens, of which there are `tokens` [rows + 1]; how many
// tokens they have in the cache, the new ones included [rows]; and the entries of their tables [rows, most pages], which
// count from first_page, from the block of tokens on in which the window of the row's first token begins.
static void check_rows(const Array& tables, const int32_t* starts, const int32_t* lengths, int64_t rows, int64_t tokens,
                       int64_t first_page, int64_t pages, int64_t page_size, int64_t window,
                       int64_t block) {
  check_index("first_page", first_page, 0, pages);
  check_index("the number of rows", rows, 0, tables.dims[0] + 1);
  check_index("q_start", starts[0], 0, tokens + 1, 0);
  for (int64_t row = 0; row < rows; row++) {
    check_index("q_start", starts[row + 1], starts[row], tokens + 1, row + 1);
    const int64_t count = starts[row + 1] - starts[row];
    if (!count) continue;
    check_index("kv_len", lengths[row], count, tables.dims[1] * page_size + 1, row);
    const int64_t seen = std::max<int64_t>(0, lengths[row] - count - window + 1);
    for (int64_t page = seen / block * block / page_size; page * page_size < lengths[row]; page++)
      check_index("block_tables", data<int32_t>(tables)[row * tables.dims[1] + page], 0, pages - first_page, row, page);
  }
}

// The pages of the cache [pages, 2, heads, page_size, page_dim], and their scales or an empty array.
struct Pages {
  const Array &data, &scales;
  int64_t heads = data.dims[2], size = data.dims[3], dim = data.dims[4];

  void check(const int32_t* slots, int64_t tokens, int64_t first_page) const {
    if (kChecked) check_slots(slots, tokens, first_page, data.dims[0], size);
  }

  // Writes a token's key (0) or value (1) [from_dim] of one head to its slot, which counts from first_page.
  template <class From, class To>
  void write(const typename From::Stored* from, int64_t from_dim, int64_t first_page, int64_t slot, int64_t which,
             int64_t head) const {
    const int64_t at = (((first_page + slot / size) * 2 + which) * heads + head) * size + slot % size;
    float* scale = element_count(scales) ? ::data<float>(scales) + at : nullptr;
    write_head<From, To>(from, from_dim, ::data<typename To::Stored>(data) + at * dim, dim, scale);
  }
};

// Arguments: pages and their scales, which share their memory with the results; keys and values [tokens, heads, dim];
// slots [tokens], -1 for padding; the page from which they count.
static void write_kv(const Call& call) {
  const Array &keys = call.argument(2), &values = call.argument(3);
  const Pages pages{call.result(0), call.result(1)};
  const int64_t tokens = keys.dims[0], dim = keys.dims[2], first_page = *data<int32_t>(call.argument(5));
  const int32_t* slots = data<int32_t>(call.argument(4));
  pages.check(slots, tokens, first_page);
  const int64_t some = std::max<int64_t>(1, (1 << 14) / (pages.heads * dim));
  with_element(pages.data.dtype, [&](auto target) {
    with_element(keys.dtype, [&](auto source) {
      using To = decltype(target);
      using From = decltype(source);
      const typename From::Stored* from[2] = {data<typename From::Stored>(keys), data<typename From::Stored>(values)};
      parallel_for(call, (tokens + some - 1) / some, [&](int64_t piece) {
        for (int64_t t = piece * some; t < std::min(tokens, (piece + 1) * some); t++)
          for (int64_t i = 0; slots[t] >= 0 && i < 2 * pages.heads; i++)
            pages.write<From, To>(from[i / pages.heads] + (t * pages.heads + i % pages.heads) * dim, dim, first_page,
                                  slots[t], i / pages.heads, i % pages.heads);
      });
    });
  });
}
DEFINE_HANDLER(WriteKv, write_kv, kAny, kF32, kAny, kAny, kS32, kS32)

// Prepares a head of queries or keys [dim]: adds its bias unless null, applies the norm if there is a scale [dim], then
// rotates by angles [dim / 2]. `to` may be `from`.
static void prepare_head(const float* from, const float* bias, const float* scale, float eps, const float* cos,
                         const float* sin, int64_t dim, float* to) {
  for (int64_t i = 0; i < dim; i++) to[i] = bias ? from[i] + bias[i] : from[i];
  if (scale) {
    Reg squares = {};
    for (int64_t i = 0; i < dim; i += kWidth) {
      const Reg x = load_some<Float32>(to + i, dim - i);
      squares += x * x;
    }
    const float factor = 1 / std::sqrt(sum_of(squares) / dim + eps);
    for (int64_t i = 0; i < dim; i++) to[i] = to[i] * factor * scale[i];
  }
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i++) {
    const float a = to[i], b = to[half + i];
    to[i] = a * cos[i] - b * sin[i], to[half + i] = b * cos[i] + a * sin[i];
  }
}

// Arguments: qkv [tokens, heads, group + 2, dim], for each head the group's queries, the key and the value; their bias
// or an empty array; cosines and sines [tokens, dim / 2]; norm scales of queries and keys [dim], or empty arrays;
// pages, scales, slots and first page as in `write_kv`; the number of leading tokens that matter. Results: the queries
// [tokens, heads, group, dim], and the pages.
static void rotate_and_write(const Call& call) {
  const Array &qkv = call.argument(0), &angles = call.argument(2);
  const auto floats = [&](int64_t i) {
    return element_count(call.argument(i)) ? data<const float>(call.argument(i)) : nullptr;
  };
  const float *bias = floats(1), *cosines = floats(2), *sines = floats(3), *q_norm = floats(4), *k_norm = floats(5);
  const Pages pages{call.result(1), call.result(2)};
  const int64_t heads = qkv.dims[1], parts = qkv.dims[2], group = parts - 2, dim = qkv.dims[3];
  const int64_t first_page = *data<int32_t>(call.argument(9)), half = angles.dims[1];
  const int64_t tokens = call.leading(10, qkv.dims[0]);
  const int32_t* slots = data<int32_t>(call.argument(8));
  pages.check(slots, tokens, first_page);
  const float *from = data<float>(qkv), eps = call.attribute<float>("eps");
  float* queries = data<float>(call.result(0));
  const int64_t some = std::max<int64_t>(1, (1 << 13) / (parts * dim));  // heads of a thread's piece
  with_element(pages.data.dtype, [&](auto element) {
    using To = decltype(element);
    parallel_for(call, (tokens * heads + some - 1) / some, [&](int64_t piece) {
      static thread_local std::vector<float> room;
      room.resize(dim);
      for (int64_t at = piece * some; at < std::min(tokens * heads, (piece + 1) * some); at++) {
        const int64_t t = at / heads, head = at % heads;
        const float *cos = cosines + t * half, *sin = sines + t * half;
        const float *part = from + at * parts * dim, *added = bias ? bias + head * parts * dim : nullptr;
        for (int64_t g = 0; g < group; g++, part += dim, added += added ? dim : 0)
          prepare_head(part, added, q_norm, eps, cos, sin, dim, queries + (at * group + g) * dim);
        if (slots[t] < 0) continue;
        prepare_head(part, added, k_norm, eps, cos, sin, dim, room.data());
        pages.write<Float32, To>(room.data(), dim, first_page, slots[t], 0, head);
        part += dim, added += added ? dim : 0;
        for (int64_t i = 0; i < dim; i++) room[i] = added ? part[i] + added[i] : part[i];
        pages.write<Float32, To>(room.data(), dim, first_page, slots[t], 1, head);
      }
    });
  });
}
DEFINE_HANDLER(RotateAndWrite, rotate_and_write, kF32, kF32, kF32, kF32, kF32, kF32, kAny, kF32, kS32, kS32, kS32)
