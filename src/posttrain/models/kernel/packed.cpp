// Attention over a packed stream, forward and backward: each run of tokens sees its prefix elsewhere in the stream and,
// causally, itself (packing.py). float32. Nothing is gathered, padded or masked.
//
// Rows are taken in blocks of ROWS, whose scores against all keys lie in a table that fits the cache. The backward pass
// computes the table again from the log-sums (Dao 2023, FlashAttention-2, algorithm 2). Threads share key heads, so
// that what is added to a key has one order: neither the bits of a row nor of a gradient depend on the number of threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "threads.h"
#include "vectors.h"

namespace {

constexpr int64_t ROWS = 48;  // of a table
constexpr int64_t MANY = 6;   // rows of a product that are computed at once, in WIDE vectors
constexpr int64_t WIDE = 2;

int64_t padded(int64_t n) { return (n + WIDE * LANES - 1) / (WIDE * LANES) * (WIDE * LANES); }

// out[r, 0..WIDE vectors) (+)= sum over n of a[r * row_step + c * column_step] b[c * b_step + ...], for R rows.
template <int64_t R>
inline void product(const float* a, int64_t row_step, int64_t column_step, const float* b, int64_t b_step, int64_t n,
                    float* out, int64_t out_step, bool adds) {
  Vector sum[R][WIDE];
  for (int64_t r = 0; r < R; r++)
    for (int64_t v = 0; v < WIDE; v++) sum[r][v] = Vector{};
  for (int64_t c = 0; c < n; c++) {
    Vector right[WIDE];
    for (int64_t v = 0; v < WIDE; v++) right[v] = load(b + c * b_step + v * LANES);
    for (int64_t r = 0; r < R; r++) {
      const float left = a[r * row_step + c * column_step];
      for (int64_t v = 0; v < WIDE; v++) sum[r][v] += left * right[v];
    }
  }
  for (int64_t r = 0; r < R; r++)
    for (int64_t v = 0; v < WIDE; v++) {
      float* at = out + r * out_step + v * LANES;
      store(at, adds ? load(at) + sum[r][v] : sum[r][v]);
    }
}

// The same of up to MANY rows, over `width` columns of b (a multiple of WIDE vectors).
void product_of(int64_t rows, const float* a, int64_t row_step, int64_t column_step, const float* b, int64_t b_step, int64_t n,
                int64_t width, float* out, int64_t out_step, bool adds) {
  const auto pass = [&](auto part) {
    for (int64_t w = 0; w < width; w += WIDE * LANES)
      part(a, row_step, column_step, b + w, b_step, n, out + w, out_step, adds);
  };
  switch (rows) {
    case 1: return pass(product<1>);
    case 2: return pass(product<2>);
    case 3: return pass(product<3>);
    case 4: return pass(product<4>);
    case 5: return pass(product<5>);
    default: return pass(product<MANY>);
  }
}

struct Sizes {
  int64_t threads, num_runs, tokens, queries, keys, dim;
  float scale;
  const int64_t* runs;  // [num_runs, 4]: start, length, prefix's start, prefix's length
};

// One run before one key head: where its tokens stand, and its keys (and values) as columns.
struct Run {
  int64_t start, length, before, before_length, columns, step;  // step: between tokens of one head of keys
  const float *keys, *values;                                  // of this head, at token 0

  Run(const Sizes& s, int64_t run, int64_t head, const float* k, const float* v)
      : start(s.runs[4 * run]), length(s.runs[4 * run + 1]), before(s.runs[4 * run + 2]),
        before_length(s.runs[4 * run + 3]), columns(before_length + length), step(s.keys * s.dim),
        keys(k + head * s.dim), values(v + head * s.dim) {}

  int64_t token(int64_t column) const { return column < before_length ? before + column : start + column - before_length; }

  // [dim, padded columns] of what stands at `of` for each token; zeros behind.
  void turn(const float* of, int64_t dim, float factor, std::vector<float>& out) const {
    const int64_t width = padded(columns);
    out.resize(dim * width);
    for (int64_t c = 0; c < width; c++) {
      const float* row = c < columns ? of + token(c) * step : nullptr;
      for (int64_t d = 0; d < dim; d++) out[d * width + c] = row ? row[d] * factor : 0;
    }
  }

  // out[rows, dim] += table[rows, first columns] times what stands at `of` for each of these tokens.
  void mix(int64_t rows, const float* table, int64_t width, int64_t count, const float* of, int64_t dim, float* out,
           int64_t out_step) const {
    const int64_t prefix = std::min(count, before_length);
    product_of(rows, table, width, 1, of + before * step, step, prefix, dim, out, out_step, false);
    product_of(rows, table + prefix, width, 1, of + start * step, step, count - prefix, dim, out, out_step, true);
  }

  // What stands at `into` for each token += table[first.., columns]^T times rows of x; row i sees its columns alone.
  void spread_back(int64_t first, int64_t rows, const float* table, int64_t width, const float* x, int64_t x_step,
                   int64_t dim, float* into) const {
    const auto strip = [&](int64_t from, int64_t end, int64_t place, bool causal) {
      for (int64_t c = from; c < end; c += MANY) {
        const int64_t skipped = causal ? std::clamp<int64_t>(c - before_length - first, 0, rows) : 0;
        product_of(std::min(MANY, end - c), table + skipped * width + c, 1, width, x + skipped * x_step, x_step,
                   rows - skipped, dim, into + (place + c - from) * step, step, true);
      }
    };
    strip(0, before_length, before, false);
    strip(before_length, before_length + std::min(length, first + rows), start, true);
  }
};

// table[rows, padded columns] = x[rows, dim] times columns, as far as each MANY rows see; -> the columns that are written.
void multiply(const Run& run, int64_t first, int64_t rows, const float* x, int64_t x_step, int64_t dim,
              const std::vector<float>& columns, float* table) {
  const int64_t width = padded(run.columns);
  for (int64_t r = 0; r < rows; r += MANY) {
    const int64_t count = std::min(MANY, rows - r), seen = run.before_length + first + r + count;
    product_of(count, x + r * x_step, x_step, 1, columns.data(), width, dim, padded(seen), table + r * width, width, false);
  }
}

// Calls work(head) for every key head, in threads.
template <typename Work>
void each_head(const Sizes& s, const Work& work) {
  share(s.keys, std::max<int64_t>(1, std::min(s.threads, s.keys)), [&](int64_t, int64_t first, int64_t end) {
    for (int64_t head = first; head < end; head++) work(head);
  });
}

}  // namespace

extern "C" {

// q, out [tokens, queries, dim]; k, v [tokens, keys, dim]; log_sums [tokens, queries]. dim: a multiple of 2 * LANES.
// Tokens that are in no run are left as they are.
void posttrain_packed_attention(int64_t threads, int64_t num_runs, int64_t tokens, int64_t queries, int64_t keys, int64_t dim,
                                float scale, const int64_t* runs, const float* q, const float* k, const float* v, float* out,
                                float* log_sums) {
  const Sizes s{threads, num_runs, tokens, queries, keys, dim, scale, runs};
  const int64_t group = queries / keys, q_step = queries * dim;
  each_head(s, [=](int64_t head) {
    std::vector<float> turned, table;
    for (int64_t index = 0; index < num_runs; index++) {
      const Run run(s, index, head, k, v);
      const int64_t width = padded(run.columns);
      run.turn(run.keys, dim, scale, turned);
      table.resize(ROWS * width);
      for (int64_t h = head * group; h < (head + 1) * group; h++) {
        for (int64_t first = 0; first < run.length; first += ROWS) {
          const int64_t rows = std::min(ROWS, run.length - first), at = (run.start + first) * q_step + h * dim;
          multiply(run, first, rows, q + at, q_step, dim, turned, table.data());
          for (int64_t r = 0; r < rows; r++) {
            float* row = table.data() + r * width;
            const int64_t seen = run.before_length + first + r + 1, end = (seen + LANES - 1) / LANES * LANES;
            std::fill(row + seen, row + end, -INFINITY);
            Vector lanes = spread(-INFINITY), sum{};
            for (int64_t c = 0; c < end; c += LANES) {
              const Vector here = load(row + c);
              lanes = here > lanes ? here : lanes;
            }
            float most = lanes[0], mass = 0;
            for (int64_t i = 1; i < LANES; i++) most = std::max(most, lanes[i]);
            for (int64_t c = 0; c < end; c += LANES) {
              const Vector e = exponential(load(row + c) - most);
              store(row + c, e);
              sum += e;
            }
            for (int64_t i = 0; i < LANES; i++) mass += sum[i];
            for (int64_t c = 0; c < end; c += LANES) store(row + c, load(row + c) * (1 / mass));
            std::fill(row + end, row + std::min(width, end + MANY), 0.0f);  // what its neighbours see
            log_sums[(run.start + first + r) * queries + h] = most + std::log(mass);
          }
          for (int64_t r = 0; r < rows; r += MANY) {
            const int64_t count = std::min(MANY, rows - r), seen = run.before_length + first + r + count;
            run.mix(count, table.data() + r * width, width, seen, run.values, dim, out + at + r * q_step, q_step);
          }
        }
      }
    }
  });
}

// dq [tokens, queries, dim] is written, dk and dv [tokens, keys, dim] are added to.
void posttrain_packed_attention_backward(int64_t threads, int64_t num_runs, int64_t tokens, int64_t queries, int64_t keys,
                                         int64_t dim, float scale, const int64_t* runs, const float* gradient, const float* q,
                                         const float* k, const float* v, const float* out, const float* log_sums, float* dq,
                                         float* dk, float* dv) {
  const Sizes s{threads, num_runs, tokens, queries, keys, dim, scale, runs};
  const int64_t group = queries / keys, q_step = queries * dim;
  each_head(s, [=](int64_t head) {
    std::vector<float> turned_k, turned_v, weights, slopes;
    for (int64_t index = 0; index < num_runs; index++) {
      const Run run(s, index, head, k, v);
      const int64_t width = padded(run.columns);
      run.turn(run.keys, dim, scale, turned_k);
      run.turn(run.values, dim, 1, turned_v);
      weights.resize(ROWS * width);
      slopes.resize(ROWS * width);
      for (int64_t h = head * group; h < (head + 1) * group; h++) {
        for (int64_t first = 0; first < run.length; first += ROWS) {
          const int64_t rows = std::min(ROWS, run.length - first), at = (run.start + first) * q_step + h * dim;
          multiply(run, first, rows, q + at, q_step, dim, turned_k, weights.data());
          multiply(run, first, rows, gradient + at, q_step, dim, turned_v, slopes.data());
          for (int64_t r = 0; r < rows; r++) {
            float *weight = weights.data() + r * width, *slope = slopes.data() + r * width;
            const int64_t seen = run.before_length + first + r + 1, end = (seen + LANES - 1) / LANES * LANES;
            const float *of_out = out + at + r * q_step, *of_gradient = gradient + at + r * q_step;
            const float log_sum = log_sums[(run.start + first + r) * queries + h];
            float along = 0;
            for (int64_t d = 0; d < dim; d++) along += of_out[d] * of_gradient[d];
            std::fill(weight + seen, weight + end, -INFINITY);
            std::fill(slope + seen, slope + end, 0.0f);
            for (int64_t c = 0; c < end; c += LANES) {
              const Vector p = exponential(load(weight + c) - log_sum);
              store(weight + c, p);
              store(slope + c, p * (load(slope + c) - along) * scale);
            }
            const int64_t behind = std::min(width, end + MANY);  // what its neighbours see
            std::fill(weight + end, weight + behind, 0.0f);
            std::fill(slope + end, slope + behind, 0.0f);
          }
          for (int64_t r = 0; r < rows; r += MANY) {
            const int64_t count = std::min(MANY, rows - r), seen = run.before_length + first + r + count;
            run.mix(count, slopes.data() + r * width, width, seen, run.keys, dim, dq + at + r * q_step, q_step);
          }
          run.spread_back(first, rows, slopes.data(), width, q + at, q_step, dim, dk + head * dim);
          run.spread_back(first, rows, weights.data(), width, gradient + at, q_step, dim, dv + head * dim);
        }
      }
    }
  });
}
}
