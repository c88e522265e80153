// Work that is shared among threads of this process, which end with it.

#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace {

// Calls work(part, first row, row behind the last) once for each part.
template <typename Work>
void share(int64_t rows, int64_t parts, const Work& work) {
  std::vector<std::thread> others;
  for (int64_t p = 1; p < parts; p++) {
    const int64_t first = rows * p / parts, end = rows * (p + 1) / parts;
    try {
      others.emplace_back(work, p, first, end);
    } catch (const std::system_error&) {  // the machine has no more threads
      work(p, first, end);
    }
  }
  work(0, 0, rows / parts);
  for (std::thread& other : others) other.join();
}

}  // namespace
