// What stands between the matrix products of an update, forward and backward: RMS norm, rotary embedding (behind a norm
// of heads, or none), SwiGLU, and the scores of tokens; and how a token is drawn. float32, contiguous. The formulas stand
// in fused.py, that of drawing in the native engine's sampler.py.
//
// Rows are shared among threads where there is enough to do. A row's bits are its own; a sum over rows (the gradient of
// a norm's weight) is taken by blocks of rows, and depends on the number of threads, which a run keeps.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "threads.h"
#include "vectors.h"

namespace {

constexpr int64_t BLOCK = 64;         // rows whose sum is taken before it is added to that of the others
constexpr int64_t SHARED = 1 << 17;  // numbers that are worth a thread

// The first `count` of LANES numbers, `fill` behind them; as many are written.
inline Vector read(const float* at, int64_t count, float fill = 0) {
  if (count == LANES) return load(at);
  Vector x = spread(fill);
  std::memcpy(&x, at, count * sizeof(float));
  return x;
}

inline void write(float* at, Vector x, int64_t count) { std::memcpy(at, &x, count * sizeof(float)); }

// Calls body(i, count) for each vector of n numbers; only the last may hold fewer than LANES.
template <typename Body>
inline void each(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) body(i, LANES);
  if (i < n) body(i, n - i);
}

inline float total(Vector x) {
  for (int64_t width = LANES / 2; width; width /= 2)
    for (int64_t i = 0; i < width; i++) x[i] += x[i + width];
  return x[0];
}

int64_t num_parts(int64_t rows, int64_t numbers, int64_t threads) {
  return std::max<int64_t>(1, std::min({threads, numbers / SHARED, rows}));
}

// Sums over rows, a part of the rows at a time; what is added in a block is kept apart until the block is full.
struct RowSums {
  int64_t dim;
  std::vector<float> block, sum;
  int64_t rows = 0;
  explicit RowSums(int64_t dim) : dim(dim), block(dim), sum(dim) {}
  float* next() {
    if (rows && rows % BLOCK == 0) settle();
    rows++;
    return block.data();
  }
  void settle() {
    for (int64_t d = 0; d < dim; d++) sum[d] += block[d];
    std::fill(block.begin(), block.end(), 0.0f);
  }
};

void add_up(std::vector<RowSums>& parts, float* out) {
  std::fill_n(out, parts[0].dim, 0.0f);
  for (RowSums& part : parts) {
    part.settle();
    for (int64_t d = 0; d < part.dim; d++) out[d] += part.sum[d];
  }
}

inline float norm_factor(const float* x, int64_t dim, float eps) {
  Vector squares{};
  each(dim, [&](int64_t i, int64_t count) {
    const Vector here = read(x + i, count);
    squares += here * here;
  });
  return 1 / std::sqrt(total(squares) / dim + eps);
}

// One row: dx = r g w - x r^3 (g w . x) / d, and r g x is added to dw. dx may be g itself; either may be null.
inline void norm_back(const float* g, const float* x, const float* w, float r, int64_t dim, float* dx, float* dw) {
  Vector products{};
  each(dim, [&](int64_t i, int64_t count) { products += read(g + i, count) * read(w + i, count) * read(x + i, count); });
  const float along = -total(products) * r * r * r / dim;
  each(dim, [&](int64_t i, int64_t count) {
    const Vector of_g = read(g + i, count), of_x = read(x + i, count);
    if (dw) write(dw + i, read(dw + i, count) + r * of_g * of_x, count);
    if (dx) write(dx + i, r * of_g * read(w + i, count) + along * of_x, count);
  });
}

inline float largest(const float* x, int64_t n) {
  Vector lanes = spread(-INFINITY);
  each(n, [&](int64_t i, int64_t count) {
    const Vector here = read(x + i, count, -INFINITY);
    lanes = here > lanes ? here : lanes;
  });
  float most = lanes[0];
  for (int64_t i = 1; i < LANES; i++) most = std::max(most, lanes[i]);
  return most;
}

inline Vector sigmoid(Vector x) {
  const Vector e = exponential(x < 0 ? x : -x);
  return (x < 0 ? e : spread(1)) / (1 + e);
}

}  // namespace

extern "C" {

// x, y [rows, dim], weight [dim], factor [rows] or null.
void posttrain_rms_norm(int64_t threads, int64_t rows, int64_t dim, const float* x, const float* weight, float eps,
                        float* y, float* factor) {
  share(rows, num_parts(rows, rows * dim, threads), [=](int64_t, int64_t first, int64_t end) {
    for (int64_t r = first; r < end; r++) {
      const float *row = x + r * dim, f = norm_factor(row, dim, eps);
      if (factor) factor[r] = f;
      each(dim, [&](int64_t i, int64_t count) {
        write(y + r * dim + i, read(row + i, count) * f * read(weight + i, count), count);
      });
    }
  });
}

// dx [rows, dim] and dweight [dim], either of which may be null.
void posttrain_rms_norm_backward(int64_t threads, int64_t rows, int64_t dim, const float* gradient, const float* x,
                                 const float* weight, const float* factor, float* dx, float* dweight) {
  const int64_t parts = num_parts(rows, rows * dim, threads);
  std::vector<RowSums> sums(parts, RowSums(dim));
  share(rows, parts, [=, &sums](int64_t part, int64_t first, int64_t end) {
    for (int64_t r = first; r < end; r++)
      norm_back(gradient + r * dim, x + r * dim, weight, factor[r], dim, dx ? dx + r * dim : nullptr,
                dweight ? sums[part].next() : nullptr);
  });
  if (dweight) add_up(sums, dweight);
}

// x, y [tokens, heads, dim]; weight [dim] and factor [tokens, heads] of the norm of heads, or null; cos, sin [tokens, dim].
void posttrain_rotate(int64_t threads, int64_t tokens, int64_t heads, int64_t dim, const float* x, const float* weight,
                      float eps, const float* cos, const float* sin, float* y, float* factor) {
  const int64_t half = dim / 2;
  share(tokens, num_parts(tokens, tokens * heads * dim, threads), [=](int64_t, int64_t first, int64_t end) {
    std::vector<float> normed(dim);
    for (int64_t t = first; t < end; t++) {
      const float *c = cos + t * dim, *s = sin + t * dim;
      for (int64_t h = t * heads; h < (t + 1) * heads; h++) {
        const float* head = x + h * dim;
        if (weight) {
          const float f = factor[h] = norm_factor(head, dim, eps);
          for (int64_t d = 0; d < dim; d++) normed[d] = head[d] * f * weight[d];
          head = normed.data();
        }
        float* out = y + h * dim;
        each(half, [&](int64_t i, int64_t count) {
          const Vector low = read(head + i, count), high = read(head + half + i, count);
          write(out + i, low * read(c + i, count) - high * read(s + i, count), count);
          write(out + half + i, high * read(c + half + i, count) + low * read(s + half + i, count), count);
        });
      }
    }
  });
}

// x, weight, factor and dweight are null where heads are not normed.
void posttrain_rotate_backward(int64_t threads, int64_t tokens, int64_t heads, int64_t dim, const float* gradient,
                               const float* x, const float* weight, const float* factor, const float* cos,
                               const float* sin, float* dx, float* dweight) {
  const int64_t half = dim / 2, parts = num_parts(tokens, tokens * heads * dim, threads);
  std::vector<RowSums> sums(parts, RowSums(dim));
  share(tokens, parts, [=, &sums](int64_t part, int64_t first, int64_t end) {
    for (int64_t t = first; t < end; t++) {
      const float *c = cos + t * dim, *s = sin + t * dim;
      for (int64_t h = t * heads; h < (t + 1) * heads; h++) {
        const float* g = gradient + h * dim;
        float* out = dx + h * dim;
        each(half, [&](int64_t i, int64_t count) {
          const Vector low = read(g + i, count), high = read(g + half + i, count);
          write(out + i, low * read(c + i, count) + high * read(s + half + i, count), count);
          write(out + half + i, high * read(c + half + i, count) - low * read(s + i, count), count);
        });
        if (weight) norm_back(out, x + h * dim, weight, factor[h], dim, out, dweight ? sums[part].next() : nullptr);
      }
    }
  });
  if (dweight) add_up(sums, dweight);
}

// out = silu(gate) up, all [n].
void posttrain_swiglu(int64_t threads, int64_t n, const float* gate, const float* up, float* out) {
  share(n, num_parts(n, n, threads), [=](int64_t, int64_t first, int64_t end) {
    each(end - first, [=](int64_t i, int64_t count) {
      const Vector g = read(gate + first + i, count);
      write(out + first + i, g * sigmoid(g) * read(up + first + i, count), count);
    });
  });
}

void posttrain_swiglu_backward(int64_t threads, int64_t n, const float* gradient, const float* gate, const float* up,
                               float* dgate, float* dup) {
  share(n, num_parts(n, n, threads), [=](int64_t, int64_t first, int64_t end) {
    each(end - first, [=](int64_t j, int64_t count) {
      const int64_t i = first + j;
      const Vector of_out = read(gradient + i, count), g = read(gate + i, count), s = sigmoid(g);
      write(dup + i, of_out * g * s, count);
      write(dgate + i, of_out * read(up + i, count) * s * (1 + g * (1 - s)), count);
    });
  });
}

// logits [rows, size], uniforms [rows] in [0, 1) -> ids [rows] and the probability of each. `table` has room for a row.
void posttrain_draw(int64_t, int64_t rows, int64_t size, const float* logits, const double* uniforms, float* table,
                    int64_t* ids, float* probabilities) {
  const float unit = 1099511627776.0f;  // 2^40: sums of whole numbers have one value in every order
  for (int64_t r = 0; r < rows; r++) {
    const float* row = logits + r * size;
    const float most = largest(row, size);
    Vector sum{};
    each(size, [&](int64_t i, int64_t count) {
      const Vector e = exponential(read(row + i, count, -INFINITY) - most);
      write(table + i, e, count);
      sum += e;
    });
    const float share_of = 1 / total(sum);
    int64_t mass = 0, seen = 0, id = 0;
    for (int64_t i = 0; i < size; i++) mass += static_cast<int64_t>(table[i] * share_of * unit);
    const int64_t threshold = static_cast<int64_t>(uniforms[r] * static_cast<double>(mass));
    for (; id < size - 1; id++) {  // of logits that are NaN, any: the caller sees it by the probability
      seen += static_cast<int64_t>(table[id] * share_of * unit);
      if (seen > threshold) break;
    }
    ids[r] = id;
    probabilities[r] = table[id] * share_of;
  }
}

// logits, probabilities [rows, size]; ids, logprobs [rows, k]; entropies [rows] or null.
void posttrain_token_scores(int64_t threads, int64_t rows, int64_t size, int64_t k, const float* logits, const int64_t* ids,
                            float* probabilities, float* logprobs, float* entropies) {
  share(rows, num_parts(rows, rows * size, threads), [=](int64_t, int64_t first, int64_t end) {
    for (int64_t r = first; r < end; r++) {
      const float* row = logits + r * size;
      float* p = probabilities + r * size;
      const float most = largest(row, size);
      Vector sum{}, weighted{};
      each(size, [&](int64_t i, int64_t count) {
        const Vector below = read(row + i, count, -INFINITY) - most, e = exponential(below);
        write(p + i, e, count);
        sum += e;
        weighted += e * (below < -FLT_MAX ? spread(-FLT_MAX) : below);  // a token that cannot occur adds nothing
      });
      const float mass = total(sum), share_of = 1 / mass, log_mass = std::log(mass);
      each(size, [&](int64_t i, int64_t count) { write(p + i, read(p + i, count) * share_of, count); });
      for (int64_t j = r * k; j < (r + 1) * k; j++) logprobs[j] = row[ids[j]] - most - log_mass;
      if (entropies) entropies[r] = log_mass - total(weighted) * share_of;
    }
  });
}

// dlogits = (ids as rows of ones) gradient - p (sum of the gradient), [rows, size].
void posttrain_token_scores_backward(int64_t threads, int64_t rows, int64_t size, int64_t k, const float* gradient,
                                     const float* probabilities, const int64_t* ids, float* dlogits) {
  share(rows, num_parts(rows, rows * size, threads), [=](int64_t, int64_t first, int64_t end) {
    for (int64_t r = first; r < end; r++) {
      float sum = 0;
      for (int64_t j = r * k; j < (r + 1) * k; j++) sum += gradient[j];
      each(size, [&](int64_t i, int64_t count) {
        write(dlogits + r * size + i, read(probabilities + r * size + i, count) * -sum, count);
      });
      for (int64_t j = r * k; j < (r + 1) * k; j++) dlogits[r * size + ids[j]] += gradient[j];
    }
  });
}
}
