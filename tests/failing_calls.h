/* What the stand-in runtimes share (tests/fakecuda.c, tools/amd/fakehip.c): a log of the calls that the library makes,
 * and one of them that fails. */
#include <stdio.h>
#include <string.h>

static struct {
  int count, fail_at,
      lasting; /* fail_at: which call fails, counted from the start; -1: none. lasting: all after it too */
  char log[1 << 16];
} calls = {.fail_at = -1};

static void start_calls(int fail_at, int lasting) {
  calls.count = 0, calls.fail_at = fail_at, calls.lasting = lasting, calls.log[0] = 0;
}

/* Counts a call; whether it is to fail. */
static int fails(const char *name) {
  size_t used = strlen(calls.log);
  snprintf(calls.log + used, sizeof calls.log - used, "%s ", name);
  int call = calls.count++;
  return calls.fail_at >= 0 && (call == calls.fail_at || (calls.lasting && call > calls.fail_at));
}
