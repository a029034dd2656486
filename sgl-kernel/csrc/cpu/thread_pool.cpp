// The pool of helpers. Parts are claimed from one atomic word. Helpers look for work for a
// while, yielding to others, and then sleep.
#include "sglang_kernels/cpu/thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <torch/csrc/stable/ops.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <vector>

namespace sglk {
namespace {

constexpr int64_t kMicrosecond = 1000;
// A helper looks for work this long before it sleeps. The gaps between the kernels of a step
// are shorter, and a wake-up costs the caller several microseconds.
constexpr int64_t kLookNs = 1000 * kMicrosecond;
// While it looks, others may take its core this often. A process that shares the core then
// takes it between two parts and hardly ever in the middle of one, where the caller would have
// to wait for the helper's next turn.
constexpr int64_t kYieldNs = 5 * kMicrosecond;
// A helper that got its core back only after this long shares it with a process that computes.
// For a while it then sleeps as soon as it runs out of work, instead of spending their shared
// time on looking.
constexpr int64_t kLostNs = 2000 * kMicrosecond;
constexpr int64_t kSleepAtOnceNs = 20000 * kMicrosecond;
constexpr int kPausesPerLook = 8;
// The caller sleeps if a helper's part takes this much longer than its own. Its core is then
// free for the helper, in case the helper lost its own.
constexpr int64_t kCallerSpinNs = 50 * kMicrosecond;

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000'000'000 + t.tv_nsec;
}

void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

using Word = std::atomic<uint32_t>;
static_assert(sizeof(Word) == sizeof(uint32_t), "a futex is a plain word");

// Returns at a wake-up, at a signal, or at once if the word is not `value`.
void futex_wait(Word& word, uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void futex_wake_one(Word& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

class Pool {
 public:
  void run(int64_t parts, int64_t threads, PartBody body, void* context) {
    if (in_use_.test_and_set(std::memory_order_acquire)) {
      for (int64_t part = 0; part < parts; part++) body(context, part);
      return;
    }
    const Release release{in_use_};
    const int64_t wanted = std::min(threads, parts) - 1;
    if (wanted > int64_t(helpers_.size())) start_helpers(wanted);
    body_ = body;
    context_ = context;
    error_ = nullptr;
    invited_.store(wanted, std::memory_order_relaxed);
    unfinished_.store(uint32_t(parts), std::memory_order_relaxed);
    ticket_.store(uint64_t(parts) << 32);
    for (int64_t i = 0; i < wanted; i++) helpers_[i]->wake();
    while (run_one_part()) {
    }
    wait_for_helpers();
    if (error_) std::rethrow_exception(error_);
  }

 private:
  struct Release {
    std::atomic_flag& flag;
    ~Release() { flag.clear(std::memory_order_release); }
  };

  struct alignas(64) Helper {
    Helper(Pool& owner, int64_t position) : pool(owner), index(position) {}

    void wake() {
      if (asleep.load() && asleep.exchange(0)) futex_wake_one(asleep);
    }

    Pool& pool;
    const int64_t index;
    Word asleep{0};
  };

  // Claims the next part and runs it; false if all are claimed. While a claim runs, `body_`
  // and `context_` belong to it: they only change after its part is finished.
  bool run_one_part() {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    do {
      if (!has_parts(ticket)) return false;
    } while (!ticket_.compare_exchange_weak(ticket, ticket + 1));
    try {
      body_(context_, int64_t(uint32_t(ticket)));
    } catch (...) {
      const std::lock_guard<std::mutex> lock(error_mutex_);
      if (!error_) error_ = std::current_exception();
    }
    if (unfinished_.fetch_sub(1) == 1 && caller_sleeps_.load()) futex_wake_one(unfinished_);
    return true;
  }

  static bool has_parts(uint64_t ticket) { return uint32_t(ticket) < ticket >> 32; }

  void wait_for_helpers() {
    if (unfinished_.load(std::memory_order_acquire) == 0) return;
    const int64_t until = now_ns() + kCallerSpinNs;
    do {
      for (int i = 0; i < kPausesPerLook; i++) pause_core();
      if (unfinished_.load(std::memory_order_acquire) == 0) return;
    } while (now_ns() < until);
    caller_sleeps_.store(true);
    while (const uint32_t left = unfinished_.load()) futex_wait(unfinished_, left);
    caller_sleeps_.store(false, std::memory_order_relaxed);
  }

  void start_helpers(int64_t count);
  static void* helper_main(void* helper);
  void help(Helper& self);
  void sleep_until_woken(Helper& self);

  // Parts of the running call in the upper half, the next to be claimed in the lower one.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  std::atomic<int64_t> invited_{0};
  PartBody body_ = nullptr;
  void* context_ = nullptr;
  alignas(64) Word unfinished_{0};
  std::atomic<bool> caller_sleeps_{false};
  std::mutex error_mutex_;
  std::exception_ptr error_;
  std::atomic_flag in_use_ = ATOMIC_FLAG_INIT;
  std::vector<std::unique_ptr<Helper>> helpers_;
};

// Each helper may run where OpenMP's thread of the same number may. The caller may be bound to
// one core (OMP_PROC_BIND), which a new thread would inherit.
std::vector<cpu_set_t> openmp_cores;
// OpenMP's threads are not usable in a forked child.
bool is_forked = false;

void find_openmp_cores(int64_t threads) {
  if (is_forked || int64_t(openmp_cores.size()) >= threads) return;
  openmp_cores.assign(threads, cpu_set_t{});
  torch::stable::parallel_for(0, threads, 1, [](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      sched_getaffinity(0, sizeof(cpu_set_t), &openmp_cores[i]);
  });
}

void Pool::start_helpers(int64_t count) {
  find_openmp_cores(count + 1);
  // Signals are for threads that know about them.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int error = 0;
  while (int64_t(helpers_.size()) < count && error == 0) {
    helpers_.push_back(std::make_unique<Helper>(*this, int64_t(helpers_.size())));
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    const size_t number = helpers_.size();
    if (number < openmp_cores.size() && CPU_COUNT(&openmp_cores[number]) > 0)
      pthread_attr_setaffinity_np(&attributes, sizeof(cpu_set_t), &openmp_cores[number]);
    pthread_t thread;
    error = pthread_create(&thread, &attributes, helper_main, helpers_.back().get());
    pthread_attr_destroy(&attributes);
    if (error)
      helpers_.pop_back();
    else
      pthread_setname_np(thread, "sglang-kernels");
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error)
    throw std::system_error(
        error, std::generic_category(), "cannot start a thread of the CPU kernels");
}

void* Pool::helper_main(void* argument) {
  Helper& self = *static_cast<Helper*>(argument);
  self.pool.help(self);
  return nullptr;
}

void Pool::help(Helper& self) {
  int64_t idle_since = now_ns(), yielded = idle_since, sleep_at_once_until = 0;
  for (;;) {
    if (self.index < invited_.load(std::memory_order_relaxed) && run_one_part()) {
      idle_since = now_ns();
      continue;
    }
    for (int i = 0; i < kPausesPerLook; i++) pause_core();
    const int64_t now = now_ns();
    if (now - idle_since > kLookNs || now < sleep_at_once_until) {
      sleep_until_woken(self);
      idle_since = now_ns();
    } else if (now - yielded > kYieldNs) {
      sched_yield();
      yielded = now_ns();
      if (yielded - now > kLostNs) sleep_at_once_until = yielded + kSleepAtOnceNs;
    }
  }
}

void Pool::sleep_until_woken(Helper& self) {
  self.asleep.store(1);
  // The caller looks at `asleep` after publishing its parts.
  if (has_parts(ticket_.load())) {
    self.asleep.store(0);
    return;
  }
  while (self.asleep.load()) futex_wait(self.asleep, 1);
}

std::atomic<Pool*> current_pool{nullptr};

// Never destroyed: helpers live until the process ends.
Pool& pool() {
  if (Pool* existing = current_pool.load(std::memory_order_acquire)) return *existing;
  static std::once_flag once;
  std::call_once(once, [] {
    current_pool.store(new Pool, std::memory_order_release);
    // A forked child has none of the helpers.
    pthread_atfork(nullptr, nullptr, [] {
      is_forked = true;
      current_pool.store(new Pool);
    });
  });
  return *current_pool.load();
}

}  // namespace

void run_parts(int64_t parts, int64_t threads, PartBody body, void* context) {
  if (parts > 0) pool().run(parts, threads, body, context);
}

}  // namespace sglk
