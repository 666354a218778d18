/* A signal handler that calls the library while its thread, and another one, are in a call: same bits, and no hang. */
#define _GNU_SOURCE
#include <pydet.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

enum { kSize = 200, kBytes = kSize * kSize * sizeof(float) };
static float a[kSize * kSize], want[kSize * kSize];
static float of_main[kSize * kSize], of_thread[kSize * kSize], of_handler[kSize * kSize];
static volatile sig_atomic_t handled, wrong;
static volatile int stop;

static void check(float *out) {
  int64_t shape[] = {kSize, kSize};
  pydet_tensor x = {a, {PYDET_CPU, 0}, 2, {PYDET_FLOAT, 32, 1}, shape, NULL, 0}, y = x;
  y.data = out;
  if (pydet_gemm(NULL, &x, &x, NULL, &y, NULL) != PYDET_OK || memcmp(out, want, kBytes)) wrong = 1;
}

static void handle(int number) {
  (void)number;
  memset(of_handler, 0, kBytes);
  check(of_handler);
  ++handled;
}

static void *compute(void *unused) {
  while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) check(of_thread);
  return unused;
}

int main(void) {
  struct itimerval often = {{0, 2000}, {0, 2000}}, never = {{0, 0}, {0, 0}};
  struct sigaction action;
  sigset_t blocked;
  pthread_t other;
  int i;
  for (i = 0; i < kSize * kSize; ++i) a[i] = (float)(i * 37 % 101) / 64 - 0.5f;
  pydet_set_threads(1);
  check(want);
  pydet_set_threads(3);
  memset(&action, 0, sizeof action);
  action.sa_handler = handle;
  check(of_main); /* makes the threads */
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGALRM);
  pthread_sigmask(SIG_BLOCK, &blocked, NULL);
  if (pthread_create(&other, NULL, compute, NULL)) return 2;
  pthread_sigmask(SIG_UNBLOCK, &blocked, NULL);
  sigaction(SIGALRM, &action, NULL);
  setitimer(ITIMER_REAL, &often, NULL);
  while (handled < 300 && !wrong) check(of_main);
  setitimer(ITIMER_REAL, &never, NULL);
  __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
  pthread_join(other, NULL);
  printf("%d signals handled, %s\n", (int)handled, wrong ? "and a result that is wrong" : "all results right");
  return wrong;
}
