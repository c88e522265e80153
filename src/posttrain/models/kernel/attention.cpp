// One decode step of one layer, between its projections: head norms, rotary embedding, the new keys and values into the
// cache, and attention over a shared prompt and the row's own columns. float32, one thread.
//
// A row's bits are a function of that row alone: a score is one dot product, always summed in the same order; a maximum
// knows no order; weights and values are summed column after column, and a hidden column adds exactly 0. So neither the
// other rows, nor where a row begins, nor how a prompt is kept can be seen in the result.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#define EIGHT_LANES  // its sums are laid out for them
#include "vectors.h"

namespace {

constexpr int64_t HEADS = 2;    // query heads whose values are mixed in one pass
constexpr int64_t VECTORS = 4;  // of LANES dimensions, likewise

// Sums of neighbours: of a's lanes into the first half of each four, of b's into the second.
inline Vector pairs(Vector a, Vector b) {
  return __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14) +
         __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
}

// The sum of the lanes of each of eight vectors.
inline Vector sums(const Vector* x) {
  Vector low = pairs(pairs(x[0], x[1]), pairs(x[2], x[3]));
  Vector high = pairs(pairs(x[4], x[5]), pairs(x[6], x[7]));
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(low, high, 4, 5, 6, 7, 12, 13, 14, 15);
}

float largest(const float* x, int64_t n) {
  Vector lanes = spread(-INFINITY);
  for (int64_t c = 0; c < n; c += LANES) {
    const Vector here = load(x + c);
    lanes = here > lanes ? here : lanes;
  }
  float most = lanes[0];
  for (int64_t i = 1; i < LANES; i++) most = std::max(most, lanes[i]);
  return most;
}

// Scores of one query over n columns [n, dim], written in eights: places behind n become -inf. is_hidden may be null.
void score(const float* query, const float* keys, int64_t n, int64_t dim, const uint8_t* is_hidden, float* scores) {
  const int64_t whole = dim / LANES * LANES;
  for (int64_t c = 0; c < n; c += LANES) {
    const float* at[LANES];
    Vector partial[LANES];
    for (int64_t i = 0; i < LANES; i++) {
      at[i] = keys + std::min(c + i, n - 1) * dim;
      partial[i] = Vector{};
    }
    for (int64_t d = 0; d < whole; d += LANES) {
      const Vector q = load(query + d);
      for (int64_t i = 0; i < LANES; i++) partial[i] += q * load(at[i] + d);
    }
    Vector total = sums(partial);
    for (int64_t d = whole; d < dim; d++) {
      Vector rest;
      for (int64_t i = 0; i < LANES; i++) rest[i] = at[i][d];
      total += query[d] * rest;
    }
    store(scores + c, total);
    for (int64_t i = 0; i < LANES; i++)
      if (c + i >= n || (is_hidden && is_hidden[c + i])) scores[c + i] = -INFINITY;
  }
}

// Adds the weighted sum of values [n, dim] to out [heads, dim] and the sum of the weights to total [heads].
template <int64_t H, int64_t V>
void mix_part(const float* const* weights, const float* values, int64_t n, int64_t dim, float* const* out, float* total) {
  Vector sum[H][V];
  float weight_sum[H];
  for (int64_t h = 0; h < H; h++) {
    weight_sum[h] = total[h];
    for (int64_t v = 0; v < V; v++) sum[h][v] = load(out[h] + v * LANES);
  }
  for (int64_t c = 0; c < n; c++) {
    Vector value[V];
    for (int64_t v = 0; v < V; v++) value[v] = load(values + c * dim + v * LANES);
    for (int64_t h = 0; h < H; h++) {
      const float weight = weights[h][c];
      weight_sum[h] += weight;
      for (int64_t v = 0; v < V; v++) sum[h][v] += weight * value[v];
    }
  }
  for (int64_t h = 0; h < H; h++) {
    total[h] = weight_sum[h];
    for (int64_t v = 0; v < V; v++) store(out[h] + v * LANES, sum[h][v]);
  }
}

template <int64_t H>
void mix(const float* const* weights, const float* values, int64_t n, int64_t dim, float* const* out, float* total) {
  float* at[H];
  float again[H];  // the sum of the weights is taken in the first pass alone
  int64_t d = 0;
  for (int64_t h = 0; h < H; h++) again[h] = 0;
  const auto pass = [&](auto part, int64_t width) {
    for (int64_t h = 0; h < H; h++) at[h] = out[h] + d;
    part(weights, values + d, n, dim, at, d == 0 ? total : again);
    d += width;
  };
  while (d + VECTORS * LANES <= dim) pass(mix_part<H, VECTORS>, VECTORS * LANES);
  while (d + LANES <= dim) pass(mix_part<H, 1>, LANES);
  if (d == dim) return;
  for (int64_t h = 0; h < H; h++) {
    for (int64_t c = 0; c < n; c++) {
      if (d == 0) total[h] += weights[h][c];
      for (int64_t j = d; j < dim; j++) out[h][j] += weights[h][c] * values[c * dim + j];
    }
  }
}

// One head of a row, normed (weight may be null) and rotated: y = x cos + turned(x) sin, whose sign is in sin.
void rotate(const float* x, const float* weight, float eps, const float* cos, const float* sin, int64_t dim, float factor,
            float* __restrict out) {
  const int64_t half = dim / 2;
  if (weight) {
    float squares = 0;
    for (int64_t d = 0; d < dim; d++) squares += x[d] * x[d];
    factor /= std::sqrt(squares / dim + eps);
  }
  for (int64_t d = 0; d < dim; d++) {
    const int64_t other = d < half ? d + half : d - half;
    const float own = weight ? x[d] * weight[d] : x[d];
    const float turned = weight ? x[other] * weight[other] : x[other];
    out[d] = (own * cos[d] + turned * sin[d]) * factor;
  }
}

}  // namespace

extern "C" {

// What a decode step has for all layers.
struct Step {
  int64_t rows, num_queries, num_keys, dim;
  float scale;
  const float *cos, *sin;              // [rows, dim]
  int64_t capacity, cursor;            // columns of the cache, and the one that is written
  const int64_t* starts;               // [rows] the first column of a row
  const uint8_t* holes;                // [rows, capacity], or null
  const int64_t *entries, *lengths;    // [rows] which prompt, [prompts] how long; null where none is shared
  int64_t width;                       // columns of the shared prompts
};

// x [rows, (queries + 2 keys) dim] -> out [rows, queries dim]. head_norm [queries + keys, dim] or null; keys and values
// [slots, heads, capacity, dim]; those of the shared prompts [prompts, heads, width, dim].
void posttrain_attend(const Step* step, const float* x, const float* head_norm, float eps, float* keys, float* values,
                      const float* shared_keys, const float* shared_values, float* out) {
  const Step s = *step;
  const int64_t dim = s.dim, group = s.num_queries / s.num_keys;
  thread_local std::vector<float> queries, scores;
  queries.resize(s.num_queries * dim);
  for (int64_t r = 0; r < s.rows; r++) {
    const float* row = x + r * (s.num_queries + 2 * s.num_keys) * dim;
    const float *cos = s.cos + r * dim, *sin = s.sin + r * dim;
    const auto norm = [&](int64_t head) { return head_norm ? head_norm + head * dim : nullptr; };
    for (int64_t h = 0; h < s.num_queries; h++)
      rotate(row + h * dim, norm(h), eps, cos, sin, dim, s.scale, queries.data() + h * dim);
    const int64_t before = s.entries ? s.lengths[s.entries[r]] : 0, own = s.cursor + 1 - s.starts[r];
    const int64_t padded = (before + LANES - 1) / LANES * LANES;  // where the scores of the row's own columns begin
    const int64_t length = padded + (own + LANES - 1) / LANES * LANES;
    scores.resize(group * length);
    for (int64_t k = 0; k < s.num_keys; k++) {
      const int64_t columns = (r * s.num_keys + k) * s.capacity;
      const float* key = row + (s.num_queries + k) * dim;
      rotate(key, norm(s.num_queries + k), eps, cos, sin, dim, 1, keys + (columns + s.cursor) * dim);
      std::memcpy(values + (columns + s.cursor) * dim, key + s.num_keys * dim, dim * sizeof(float));
      const int64_t prompt = before ? (s.entries[r] * s.num_keys + k) * s.width * dim : 0;
      const int64_t first = (columns + s.starts[r]) * dim;
      const uint8_t* is_hidden = s.holes ? s.holes + r * s.capacity + s.starts[r] : nullptr;
      for (int64_t g = 0; g < group; g++) {
        const float* query = queries.data() + (k * group + g) * dim;
        float* of = scores.data() + g * length;
        if (before) score(query, shared_keys + prompt, before, dim, nullptr, of);
        score(query, keys + first, own, dim, is_hidden, of + padded);
        const float most = largest(of, length);
        for (int64_t c = 0; c < length; c += LANES) store(of + c, exponential(load(of + c) - most));
      }
      for (int64_t g = 0; g < group; g += HEADS) {
        const int64_t count = std::min(HEADS, group - g);
        float total[HEADS] = {};
        float* into[HEADS];
        const float *on_prompt[HEADS], *on_own[HEADS];
        for (int64_t h = 0; h < count; h++) {
          into[h] = out + (r * s.num_queries + k * group + g + h) * dim;
          on_prompt[h] = scores.data() + (g + h) * length;
          on_own[h] = on_prompt[h] + padded;
          std::fill_n(into[h], dim, 0.0f);
        }
        const auto mixed = count == HEADS ? mix<HEADS> : mix<1>;
        if (before) mixed(on_prompt, shared_values + prompt, before, dim, into, total);
        mixed(on_own, values + first, own, dim, into, total);
        for (int64_t h = 0; h < count; h++)
          for (int64_t d = 0; d < dim; d++) into[h][d] /= total[h];
      }
    }
  }
}
}
