// For tests/test_options.py: structures that grew after a release. Prints one line a case: what was read, or the sentence.
#include <initializer_list>

#include "core/options.h"

namespace pydet {

struct Options {  // 16 bytes in the first release, 24 in the second
  uint32_t struct_size;
  int32_t reserved;
  int64_t first;
  double second;
  int64_t third;  // of this release
};
template <> struct EarlierSizes<Options> {
  static constexpr uint32_t sizes[] = {16, 24};
};

}  // namespace pydet

using namespace pydet;

int main() {
  for (uint32_t size : {0u, 8u, 15u, 16u, 20u, 24u, 28u, 32u, 33u, 40u, 4096u, 4104u, 4294967295u}) {
    alignas(8) static char memory[4096];
    Options given = {size, 0, 1, 2.5, 3}, read = {9, 9, 9, 9, 9};
    memset(memory, 0, sizeof memory);
    memcpy(memory, &given, sizeof given);
    const pydet_status status = read_options("test", reinterpret_cast<Options *>(memory), &read);
    if (status != PYDET_OK) printf("%u: %d %s\n", size, int(status), last_error);
    else
      printf("%u: %u %lld %g %lld\n", size, read.struct_size, (long long)read.first, read.second,
             (long long)read.third);
  }
  for (uint32_t byte : {32u, 39u, 40u}) {
    alignas(8) char memory[48] = {};
    Options given = {40, 0, 1, 2.5, 3}, read = {};
    memcpy(memory, &given, sizeof given);
    memory[byte] = 1;
    const pydet_status status = read_options("test", reinterpret_cast<Options *>(memory), &read);
    printf("byte %u: %d %s\n", byte, int(status), status == PYDET_OK ? "" : last_error);
  }
  for (uint32_t size : {16u, 24u, 32u, 40u}) {
    alignas(8) char memory[48];
    memset(memory, 0x55, sizeof memory);
    memcpy(memory, &size, sizeof size);
    write_info(Options{32, 7, 1, 2.5, 3}, reinterpret_cast<Options *>(memory));
    printf("info %u:", size);
    for (uint32_t at = 0; at < sizeof memory; at += 8) {
      uint64_t word;
      memcpy(&word, memory + at, 8);
      printf(" %llx", (unsigned long long)word);
    }
    printf("\n");
  }
}

// What the checks link to and never call here.
const Backend &pydet::cpu_backend() { __builtin_trap(); }
const Backend *pydet::gpu_backend() { return nullptr; }
