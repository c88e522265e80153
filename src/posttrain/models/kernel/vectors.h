// Vectors of LANES float32 numbers, for compilers that know GCC's extensions: what a register of the CPU holds, or
// eight where whoever includes this says so. Wider ones are compared number by number (GCC 12 on AVX2: sixteen make
// SwiGLU 3 times, the scores of tokens 4 times and a norm 5 times as slow as eight).

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

#if defined(__AVX512F__) && !defined(EIGHT_LANES)
constexpr int64_t LANES = 16;
#elif defined(__AVX2__) || defined(EIGHT_LANES)
constexpr int64_t LANES = 8;
#else
constexpr int64_t LANES = 4;
#endif

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));

inline Vector load(const float* at) {
  Vector x;
  std::memcpy(&x, at, sizeof x);
  return x;
}

inline void store(float* at, Vector x) { std::memcpy(at, &x, sizeof x); }

inline Vector spread(float x) { return Vector{} + x; }

// e^x for x <= 0, within 2 units of the last place; exactly 0 below -87, where float32 has no normal numbers.
// x = n ln 2 + r, and e^r by its Taylor series to the power of 7 (|r| <= 0.35: 5e-9 is left out).
inline Vector exponential(Vector x) {
  const Integers is_below = x <= -87.0f;  // what is no number stays none
  const Vector kept = is_below ? Vector{} : x;
  Vector shifted = kept * 1.44269504f + 12582912.0f;  // 1.5 * 2^23 rounds to a whole number, in the low bits
  Integers bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  Vector n = shifted - 12582912.0f;
  Vector r = (kept - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector y = spread(1.0f / 5040);
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = y * r + c;
  Integers power = (bits - 0x4B400000 + 127) << 23;
  Vector scale;
  std::memcpy(&scale, &power, sizeof scale);
  return is_below ? Vector{} : y * scale;
}

}  // namespace
