// sim: a simulated accelerator behind torch's own interface for accelerators, PrivateUse1.
//
// Theory of operation. A program on an accelerator is two programs: the host enqueues work, and the device does it
// later. Four things follow, and this file has a section for each.
//
//   Streams   A stream is a queue of work and a thread that does it in order. Streams know nothing of each other; an
//             event (here: a mark in a queue) is the only way to order work of two streams, or of a stream and the host.
//   Memory    The host must not touch device memory. Its addresses are reserved without any access right, so a host that
//             follows one gets SIGSEGV. The bytes are in a second region of the same size, the backing; only streams use
//             it. A freed block goes back to a cache of the stream that allocated it, and may be given out again at
//             once: work of one stream is in order, so the next user comes after the last. Another stream must say that
//             it uses the block (record_stream), or it reads what the next user writes. To show that mistake each time,
//             a block is filled with 0xFF (NaN) when it is free, by its own stream, in order.
//   Copies    The device reads pinned memory by itself, while the host goes on. From pageable memory it cannot, so the
//             host waits for such a copy. A device has one copy engine for each direction. Pinned is what the allocator
//             of pinned memory gave out, which knows the copies from it, and what the program has registered, which the
//             device reads when its turn comes, whatever the program has written there or unmapped meanwhile.
//   Kernels   An operator is enqueued without being computed, so the shape of its result must be known first: torch's
//             "meta" device computes shapes alone. The stream then computes with torch's CPU operator, on CPU tensors that
//             view the backing. An operator without such shapes (nonzero) or with random numbers runs at once, with
//             copies to the CPU and back, and the host waits. `fallbacks` lists those that did.
//
// Time. Each stream has a modelled time (see `settings`): its work begins when it is enqueued, or when the work before it
// ends, and takes at least what is set. The thread computes as soon as it can; only before a mark it sleeps until the
// stream's time, for nothing else lets the host or another stream see how far it is. So the times of marks and of the log
// are exact, however late the system wakes a thread; work that takes the processor longer than its modelled time ends
// later. All times are CLOCK_MONOTONIC ns.
//
// Rules of use: what is allocated here is never freed (threads may outlive main). A forked child must not use the device.

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace {

using at::IValue;
using at::Tensor;
using c10::DeviceIndex;
using torch::jit::Stack;

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
constexpr int kStreams = 32;  // of a device; torch.Stream() gives them out in turn, as CUDA's pool does
constexpr unsigned char kPoison = 0xFF;
constexpr int64_t kLook = 20'000'000;  // ns after which a stream that sleeps looks whether its device has failed

// What a device of 2020 does, in bytes per ns (GB/s) and ns. Python sets them by name.
std::map<std::string, std::atomic<double>> settings = [] {
  std::map<std::string, std::atomic<double>> all;
  all["pinned"] = 12.0;      // GB/s of a copy from or to pinned memory
  all["pageable"] = 4.0;     // GB/s of a copy from or to pageable memory
  all["device"] = 500.0;     // GB/s of a copy inside a device
  all["latency"] = 10e3;     // ns of a copy without a byte
  all["kernel"] = 10e3;      // ns of any kernel, at least
  all["memory"] = 4.0 * (1ull << 30);  // bytes of a device
  all["lockable"] = 1e15;    // bytes of host memory that may be registered
  return all;
}();

int64_t now() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

pid_t user = 0;  // the process that uses the devices; 0 = none yet

bool usable() {
  return user == 0 || user == getpid();
}

void check_process() {
  TORCH_CHECK(usable(), "simulated accelerator: this process was forked from one that uses the device, and cannot use "
                        "it: use the 'spawn' start method, or leave the device to the parent");
}

// --- Streams ---------------------------------------------------------------------------------------------------------
// A position in a stream, reached when all work before it is done.
struct Mark {
  DeviceIndex device = 0;
  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false;
  int64_t at = 0;

  void reach(int64_t when) {
    std::lock_guard<std::mutex> guard(mutex);
    at = when;
    reached = true;
    changed.notify_all();
  }
  bool is_reached() {
    std::lock_guard<std::mutex> guard(mutex);
    return reached;
  }
  int64_t wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return reached; });
    return at;
  }
};
using MarkPtr = std::shared_ptr<Mark>;

enum Kind : int64_t { KERNEL, TO_DEVICE, TO_HOST, ON_DEVICE, SLEEP };

struct Done {  // one entry of the accelerator's own log
  int64_t kind, device, stream, begin, end, bytes;
};

struct Log {
  std::mutex mutex;
  bool on = false;
  std::vector<Done> done;
} record;

// Sleeps and hangs end early when `woken` changes.
struct Sleepers {
  std::mutex mutex;
  std::condition_variable changed;
  int64_t woken = 0;

  int64_t count() {
    std::lock_guard<std::mutex> guard(mutex);
    return woken;
  }
  void sleep(int64_t ns, int64_t seen) {  // seen: `count` when it was enqueued, so that no `wake` is too early
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait_for(lock, std::chrono::nanoseconds(ns), [&] { return woken != seen; });
  }
  void wake() {
    std::lock_guard<std::mutex> guard(mutex);
    woken++;
    changed.notify_all();
  }
} sleepers;

struct CopyEngine {
  std::mutex mutex;
  int64_t free_at = 0;

  // Occupy the engine, not before `earliest`; return when that begins.
  int64_t take(int64_t earliest, int64_t ns) {
    std::lock_guard<std::mutex> guard(mutex);
    auto begin = std::max(earliest, free_at);
    free_at = begin + ns;
    return begin;
  }
};

struct DeviceState {
  CopyEngine engines[2];  // one for each direction
  std::mutex mutex;
  std::string failure;  // of the first kernel that failed; the device is unusable from then on

  bool failed() {
    std::lock_guard<std::mutex> guard(mutex);
    return !failure.empty();
  }
  void fail(const char* why) {
    std::lock_guard<std::mutex> guard(mutex);
    if (failure.empty()) failure = why;
  }
  void check() {
    std::lock_guard<std::mutex> guard(mutex);
    TORCH_CHECK(failure.empty(), "simulated accelerator: sim:", index(), ": a kernel has failed: ", failure);
  }
  int64_t index() const;
} states[kDevices];

int64_t DeviceState::index() const {
  return this - states;
}

struct Queue {
  DeviceIndex device = 0;
  int64_t id = 0;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> work;
  bool started = false;
  bool busy = false;    // the thread does a step
  int64_t free_at = 0;  // modelled: when the work that the thread has done ends; the thread's while it is busy

  void put(std::function<void()> step) {
    std::lock_guard<std::mutex> guard(mutex);
    if (!started) {
      user = getpid();
      started = true;
      std::thread([this] { play(); }).detach();
    }
    work.push_back(std::move(step));
    changed.notify_one();
  }

  void play() {
    at::set_num_threads(1);  // of this thread: the loader's workers need the cores
    prctl(PR_SET_TIMERSLACK, 1);  // ns by which the system may delay the end of a sleep; by default 50 us for each kernel
    c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    for (;;) {
      std::function<void()> step;
      {
        std::unique_lock<std::mutex> lock(mutex);
        busy = false;
        changed.wait(lock, [this] { return !work.empty(); });
        step = std::move(work.front());
        work.pop_front();
        busy = true;
      }
      step();
    }
  }

  // Let the stream's time be `enqueued` or later, and sleep until then; a failed device has no more time.
  void catch_up(int64_t enqueued) {
    free_at = std::max(free_at, enqueued);
    for (int64_t ahead; (ahead = free_at - now()) > 0;) {
      if (states[device].failed()) free_at = now();
      std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(ahead, kLook)));
    }
  }

  // Enqueue work that takes `least` ns or more; a copy also takes its direction's engine.
  void run(Kind kind, double least, int64_t bytes, std::function<void()> what) {
    put([=, this, enqueued = now()] {
      if (states[device].failed()) return;
      auto begin = std::max(free_at, enqueued);
      if (kind == TO_DEVICE || kind == TO_HOST) {
        catch_up(enqueued);  // streams take the engine in the order of their times
        begin = states[device].engines[kind == TO_HOST].take(begin, least);
      }
      try {
        what();
      } catch (const std::exception& error) {
        states[device].fail(error.what());
      }
      free_at = std::max(begin + int64_t(least), now());
      std::lock_guard<std::mutex> guard(record.mutex);
      if (record.on) record.done.push_back({kind, device, id, begin, free_at, bytes});
    });
  }

  MarkPtr mark() {
    auto mark = std::make_shared<Mark>();
    mark->device = device;
    put([=, this, enqueued = now()] { catch_up(enqueued), mark->reach(free_at); });
    return mark;
  }
  void wait_for(MarkPtr mark) {
    put([=, this] { free_at = std::max(free_at, mark->wait()); });
  }
  bool idle() {
    std::lock_guard<std::mutex> guard(mutex);
    return work.empty() && !busy && free_at <= now();
  }
  void synchronize() {
    if (started) mark()->wait();
    states[device].check();
  }
};

// Never freed: the threads use them until the process ends.
Queue& queue_of(DeviceIndex device, int64_t id) {
  static auto* all = [] {
    auto* made = new Queue[kDevices * kStreams];
    for (int i = 0; i < kDevices * kStreams; i++) made[i].device = i / kStreams, made[i].id = i % kStreams;
    return made;
  }();
  check_process();
  TORCH_CHECK(0 <= device && device < kDevices && 0 <= id && id < kStreams, "simulated accelerator: no stream ", id,
              " on device ", int(device), ": there are ", kDevices, " devices");
  return all[device * kStreams + id];
}
Queue& queue_of(c10::Stream stream) {
  return queue_of(stream.device_index(), stream.id());
}

thread_local DeviceIndex current_device = 0;
thread_local int64_t current_stream[kDevices] = {};

Queue& current(DeviceIndex device) {
  return queue_of(device, current_stream[device]);
}

void synchronize(DeviceIndex device) {
  for (int id = 0; id < kStreams; id++) queue_of(device, id).synchronize();
}

// --- Device memory ---------------------------------------------------------------------------------------------------
struct Block {
  char* address;
  size_t size;
  size_t asked;
  Queue* owner;
  std::vector<Queue*> users;  // other streams, told by record_stream
};

void count(c10::CachingAllocator::StatArray& stat, int64_t bytes) {
  auto& all = stat[size_t(c10::CachingAllocator::StatType::AGGREGATE)];
  bytes > 0 ? all.increase(bytes) : all.decrease(-bytes);
}

// The caching allocator of one device.
struct Heap {
  static constexpr size_t kSpace = 32ull << 30;  // addresses; pages are used when they are written to
  std::recursive_mutex mutex;
  char* space = nullptr;    // addresses that nobody may follow
  char* backing = nullptr;  // the bytes
  size_t used = 0;
  std::map<char*, Block*> live;
  std::map<std::pair<Queue*, size_t>, std::vector<Block*>> cached;  // by owner and size
  std::multimap<size_t, char*> released;                            // addresses without an owner, by size
  std::vector<std::pair<Block*, std::vector<MarkPtr>>> waiting;     // freed, but another stream still uses it
  c10::CachingDeviceAllocator::DeviceStats stats;

  Block* get(size_t asked, Queue& owner) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    reclaim();
    size_t size = 512;
    while (size < asked) size *= 2;  // few sizes, so that a cached block often fits
    if (size > (1 << 20)) size = (asked + (1 << 20) - 1) >> 20 << 20;
    auto* block = from_cache(size, owner);
    if (!block) block = make(size, owner);
    block->asked = asked;
    live[block->address] = block;
    count(stats.allocated_bytes, asked);
    count(stats.active_bytes, size);
    return block;
  }

  Block* from_cache(size_t size, Queue& owner) {
    auto found = cached.find({&owner, size});
    if (found == cached.end() || found->second.empty()) return nullptr;
    auto* block = found->second.back();
    found->second.pop_back();
    return block;
  }

  Block* make(size_t size, Queue& owner) {
    auto limit = size_t(settings["memory"]);
    auto& reserved = stats.reserved_bytes[0].current;
    if (reserved + size > limit) empty();
    TORCH_CHECK_WITH(OutOfMemoryError, reserved + size <= limit, "simulated accelerator: out of memory: ", size,
                     " bytes are asked for, and ", reserved, " of ", limit, " are in use");
    count(stats.reserved_bytes, size);
    auto found = released.find(size);
    if (found != released.end()) {
      auto* block = new Block{found->second, size, 0, &owner, {}};
      released.erase(found);
      return block;
    }
    if (!space) {
      auto map = [](int access) {
        return static_cast<char*>(mmap(nullptr, kSpace, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
      };
      space = map(PROT_NONE), backing = map(PROT_READ | PROT_WRITE);
      TORCH_CHECK(space != MAP_FAILED && backing != MAP_FAILED,
                  "simulated accelerator: the system does not reserve 32 GiB of addresses: raise `ulimit -v`");
    }
    TORCH_CHECK_WITH(OutOfMemoryError, used + size <= kSpace, "simulated accelerator: out of addresses");
    used += size;
    return new Block{space + used - size, size, 0, &owner, {}};
  }

  void free(Block* block) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    live.erase(block->address);
    count(stats.allocated_bytes, -int64_t(block->asked));
    std::vector<MarkPtr> marks;
    for (auto* queue : block->users) marks.push_back(queue->mark());
    block->users.clear();
    if (marks.empty())
      recycle(block);
    else
      waiting.emplace_back(block, std::move(marks));
  }

  // Take back the blocks that the other streams have finished with.
  void reclaim() {
    for (auto it = waiting.begin(); it != waiting.end();) {
      bool done = true;
      for (auto& mark : it->second) done = done && mark->is_reached();
      if (done) recycle(it->first);
      it = done ? waiting.erase(it) : it + 1;
    }
  }

  // The poison is work of the owner: what it has enqueued before may still use the block.
  void recycle(Block* block) {
    count(stats.active_bytes, -int64_t(block->size));
    auto* bytes = at(block->address);
    auto size = block->asked;
    block->owner->put([=] { memset(bytes, kPoison, size); });
    cached[{block->owner, block->size}].push_back(block);
  }

  // Give the cached blocks up.
  void empty() {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    reclaim();
    for (auto& [key, blocks] : cached) {
      if (!blocks.empty()) key.first->mark()->wait();
      for (auto* block : blocks) {
        madvise(at(block->address), block->size / 4096 * 4096, MADV_DONTNEED);
        released.emplace(block->size, block->address);
        count(stats.reserved_bytes, -int64_t(block->size));
        delete block;
      }
      blocks.clear();
    }
  }

  void use(void* address, Queue& queue) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    auto found = live.upper_bound(static_cast<char*>(address));
    if (found == live.begin()) return;
    auto* block = (--found)->second;
    if (address >= block->address + block->size || &queue == block->owner) return;
    for (auto* known : block->users)
      if (known == &queue) return;
    block->users.push_back(&queue);
  }

  char* at(void* address) {  // where the bytes of an address are
    return backing + (static_cast<char*>(address) - space);
  }
};

Heap& heap_of(DeviceIndex device) {
  static auto* all = new Heap[kDevices];
  return all[device];
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device(kSim, current_device);
    auto& queue = current(current_device);
    states[current_device].check();
    if (bytes == 0) return {nullptr, device};
    auto* block = heap_of(current_device).get(bytes, queue);
    return {block->address, block, &free, device};
  }
  static void free(void* context) {
    auto* block = static_cast<Block*>(context);
    if (usable()) heap_of(block->owner->device).free(block);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;  // a block is not found by its address alone
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    auto& heap = heap_of(current_device);
    auto *target = heap.at(to), *source = heap.at(const_cast<void*>(from));
    current(current_device).run(ON_DEVICE, bytes / settings["device"], bytes, [=] { memcpy(target, source, bytes); });
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < kDevices; device++) heap_of(device).empty();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get()) heap_of(data.device().index()).use(data.get(), queue_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard<std::recursive_mutex> guard(heap_of(device).mutex);
    heap_of(device).reclaim();
    return heap_of(device).stats;
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    each(device, [](auto& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(DeviceIndex device) override {
    each(device, [](auto& stat) { stat.reset_peak(); });
  }
  template <class Change>
  void each(DeviceIndex device, Change change) {
    std::lock_guard<std::recursive_mutex> guard(heap_of(device).mutex);
    auto& stats = heap_of(device).stats;
    for (auto* stat : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes}) change((*stat)[0]);
  }
};
DeviceMemory device_memory;

// --- Pinned memory ---------------------------------------------------------------------------------------------------
// Host memory that the allocator knows as pinned. A freed buffer is given out again when the copies that use it have
// ended; it is poisoned then. The pages are not locked: no device reads them behind the system's back.
struct PinnedMemory final : c10::Allocator {
  struct Buffer {
    char* address;
    size_t size;
    std::vector<MarkPtr> copies;
  };
  std::mutex mutex;
  std::map<char*, Buffer*> live;
  std::map<size_t, std::vector<Buffer*>> cached;
  std::vector<Buffer*> waiting;
  c10::CachingAllocator::Stat bytes;  // given out, or freed and still read by a copy
  size_t reserved = 0;

  c10::DataPtr allocate(size_t asked) override;
  static void free(void* context);
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }

  Buffer* find(const void* address) {
    auto* wanted = static_cast<char*>(const_cast<void*>(address));
    auto found = live.upper_bound(wanted);
    if (found == live.begin()) return nullptr;
    auto* buffer = (--found)->second;
    return wanted < buffer->address + buffer->size ? buffer : nullptr;
  }
  bool is_pinned(const void* address) {
    if (!usable()) return false;  // a forked child: another thread of the parent may have held the lock
    std::lock_guard<std::mutex> guard(mutex);
    return find(address) != nullptr;
  }
  void use(const void* address, MarkPtr mark) {
    std::lock_guard<std::mutex> guard(mutex);
    if (auto* buffer = find(address)) buffer->copies.push_back(std::move(mark));
  }
  void reclaim() {
    for (auto it = waiting.begin(); it != waiting.end();) {
      auto* buffer = *it;
      while (!buffer->copies.empty() && buffer->copies.back()->is_reached()) buffer->copies.pop_back();
      bool done = buffer->copies.empty();
      if (done) recycle(buffer);
      it = done ? waiting.erase(it) : it + 1;
    }
  }
  void recycle(Buffer* buffer) {
    memset(buffer->address, kPoison, buffer->size);
    bytes.decrease(buffer->size);
    cached[buffer->size].push_back(buffer);
  }
};
auto& pinned = *new PinnedMemory;

c10::DataPtr PinnedMemory::allocate(size_t asked) {
  if (asked == 0) return {nullptr, c10::kCPU};
  check_process();
  user = getpid();
  std::lock_guard<std::mutex> guard(mutex);
  reclaim();
  size_t size = 4096;
  while (size < asked) size *= 2;
  auto& fitting = cached[size];
  Buffer* buffer;
  if (fitting.empty()) {
    auto* address = static_cast<char*>(std::aligned_alloc(4096, size));
    TORCH_CHECK(address, "simulated accelerator: no host memory for ", size, " pinned bytes");
    buffer = new Buffer{address, size, {}};
    reserved += size;
  } else {
    buffer = fitting.back();
    fitting.pop_back();
  }
  live[buffer->address] = buffer;
  bytes.increase(size);
  return {buffer->address, buffer, &free, c10::kCPU};
}

void PinnedMemory::free(void* context) {
  if (!usable()) return;
  auto* buffer = static_cast<Buffer*>(context);
  std::lock_guard<std::mutex> guard(pinned.mutex);
  pinned.live.erase(buffer->address);
  pinned.waiting.push_back(buffer);
  pinned.reclaim();
}

// Host memory that the program has registered. Its pages are not locked either.
struct RegisteredMemory {
  std::mutex mutex;
  std::map<char*, size_t> ranges;
  size_t bytes = 0;
  int64_t times = 0;  // that memory was registered

  bool find(const void* address) {
    if (!usable()) return false;
    auto* wanted = static_cast<char*>(const_cast<void*>(address));
    std::lock_guard<std::mutex> guard(mutex);
    auto found = ranges.upper_bound(wanted);
    if (found == ranges.begin()) return false;
    --found;  // not within the sum, whose parts C++ evaluates in any order
    return wanted < found->first + found->second;
  }
  bool add(char* address, size_t size) {
    std::lock_guard<std::mutex> guard(mutex);
    if (bytes + size > settings["lockable"] || !ranges.emplace(address, size).second) return false;
    bytes += size, times++;
    return true;
  }
  bool remove(char* address) {
    std::lock_guard<std::mutex> guard(mutex);
    auto found = ranges.find(address);
    if (found == ranges.end()) return false;
    bytes -= found->second;
    ranges.erase(found);
    return true;
  }
};
auto& registered_memory = *new RegisteredMemory;

bool is_pinned(const void* address) {
  return pinned.is_pinned(address) || registered_memory.find(address);
}

// --- What torch asks of an accelerator: devices, streams, events -------------------------------------------------------
using EventMark = MarkPtr;  // torch's event holds a pointer to the mark of its last record
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kSim;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {kSim, current_device};
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "simulated accelerator: no device ", int(device.index()), ": there are ",
                kDevices);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(device, current_stream[index(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(device, 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {  // priorities are taken and have no effect
    static std::atomic<int64_t> given[kDevices];
    return stream(device, 1 + given[index(device)]++ % (kStreams - 1));
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = getStream(next.device());
    current_stream[next.device_index()] = next.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
  bool queryStream(const c10::Stream& of) const override {
    states[of.device_index()].check();
    return queue_of(of).idle();
  }
  void synchronizeStream(const c10::Stream& of) const override {
    queue_of(of).synchronize();
  }
  void synchronizeDevice(DeviceIndex device) const override {
    synchronize(device < 0 ? current_device : device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& of) const override {
    device_memory.recordStream(data, of);
  }
  void record(void** event, const c10::Stream& of, DeviceIndex, c10::EventFlag) const override {
    states[of.device_index()].check();
    auto mark = queue_of(of).mark();
    if (!*event) *event = new EventMark;
    *static_cast<EventMark*>(*event) = mark;
  }
  void block(void* event, const c10::Stream& of) const override {
    if (event) queue_of(of).wait_for(*static_cast<EventMark*>(event));
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto& mark = *static_cast<EventMark*>(event);
    states[mark->device].check();
    return mark->is_reached();
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    auto& mark = *static_cast<EventMark*>(event);
    mark->wait();
    states[mark->device].check();
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<EventMark*>(event);
  }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    TORCH_CHECK(first && second, "simulated accelerator: elapsed_time needs two recorded events");
    auto &from = *static_cast<EventMark*>(first), &to = *static_cast<EventMark*>(second);
    TORCH_CHECK(from->is_reached() && to->is_reached(), "simulated accelerator: an event is not reached yet");
    return double(to->at - from->at) / 1e6;  // ms
  }

  static DeviceIndex index(c10::Device device) {
    return device.index() < 0 ? current_device : device.index();
  }
  static c10::Stream stream(c10::Device device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, {kSim, index(device)}, id);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
const Guard guard_impl;

void resize_bytes(c10::StorageImpl* storage, size_t bytes) {
  auto kept = std::min(bytes, storage->nbytes());
  auto before = current_device;
  current_device = storage->device().index();
  auto data = device_memory.allocate(bytes);
  if (kept) device_memory.copy_data(data.get(), storage->data(), kept);
  current_device = before;
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return kDevices;
  }
  DeviceIndex getCurrentDevice() const override {
    return current_device;
  }
  void setCurrentDevice(DeviceIndex device) const override {
    guard_impl.setDevice({kSim, device});
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return guard_impl.exchangeDevice({kSim, device}).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? current_device : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* address) const override {
    return is_pinned(address);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_bytes(storage.unsafeGetStorageImpl(), bytes);
  }
};

// --- Copies ----------------------------------------------------------------------------------------------------------
bool on_sim(const Tensor& tensor) {
  return tensor.device().type() == kSim;
}

// A CPU tensor that views the bytes of a device's tensor. For streams only: the host would not see what is enqueued.
Tensor view_of(const Tensor& tensor) {
  auto options = tensor.options().device(c10::kCPU).requires_grad(false);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(heap_of(tensor.device().index()).at(tensor.data_ptr()), tensor.sizes(), tensor.strides(), options);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, c10::ScalarType type, c10::Device device) {
  const c10::DeviceGuard on(device);
  return at::detail::empty_strided_generic(size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           type);
}

bool same_layout(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
      a.is_non_overlapping_and_dense() && a.is_neg() == b.is_neg() && a.is_conj() == b.is_conj();
}

// Copy bytes between a device's tensor and a host's of the same layout, in the current stream.
void transfer(const Tensor& there, const Tensor& here, Kind kind, bool non_blocking) {
  if (there.numel() == 0) return;
  auto device = there.device().index();
  auto& queue = current(device);
  states[device].check();
  auto bytes = size_t(there.nbytes());
  auto *far = heap_of(device).at(there.data_ptr()), *near = static_cast<char*>(here.data_ptr());
  auto* to = kind == TO_DEVICE ? far : near;
  auto* from = kind == TO_DEVICE ? near : far;
  auto near_is_pinned = is_pinned(near);
  auto speed = double(settings[near_is_pinned ? "pinned" : "pageable"]);
  queue.run(kind, settings["latency"] + bytes / speed, bytes, [=] { memcpy(to, from, bytes); });
  auto mark = queue.mark();
  if (near_is_pinned) pinned.use(near, mark);
  if (near_is_pinned && non_blocking) return;
  mark->wait();  // the device cannot read pageable memory, which may be paged out or freed: the host waits
  states[device].check();
}

// Enqueue a copy between tensors of devices, which may differ in layout and type.
void copy_on_devices(const Tensor& from, const Tensor& to) {
  auto &queue = current(to.device().index()), &other = current(from.device().index());
  auto source = view_of(from), target = view_of(to);
  auto speed = double(settings[&queue == &other ? "device" : "pinned"]);
  if (&queue != &other) queue.wait_for(other.mark());
  queue.run(ON_DEVICE, settings["kernel"] + to.nbytes() / speed, to.nbytes(),
            [=]() mutable { target.copy_(source); });
  if (&queue != &other) other.wait_for(queue.mark());
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  auto source = from.expand(to.sizes());
  if (on_sim(from) && on_sim(to)) {
    copy_on_devices(source, to);
  } else if (on_sim(to)) {
    if (same_layout(source, to)) {
      transfer(to, source, TO_DEVICE, non_blocking);
    } else {  // the bytes cross as they are; the device changes type and layout
      auto packed = source.contiguous();
      auto raw = empty_strided(packed.sizes(), packed.strides(), packed.scalar_type(), to.device());
      transfer(raw, packed, TO_DEVICE, non_blocking);
      copy_on_devices(raw, to);
    }
  } else if (same_layout(source, to)) {
    transfer(source, to, TO_HOST, non_blocking);
  } else {
    auto raw = empty_strided(to.sizes(), to.contiguous().strides(), to.scalar_type(), from.device());
    copy_on_devices(source, raw);
    auto packed = at::empty(to.sizes(), to.options());
    transfer(raw, packed, TO_HOST, false);
    const_cast<Tensor&>(to).copy_(packed);
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

// --- Kernels ---------------------------------------------------------------------------------------------------------
struct Names {
  std::mutex mutex;
  std::map<std::string, int64_t> counts;
} fallbacks;
std::set<std::string> shapeless;  // operators that the meta device does not know; guarded by fallbacks.mutex

void run_at_once(const c10::OperatorHandle& op, Stack* stack) {
  {
    std::lock_guard<std::mutex> guard(fallbacks.mutex);
    fallbacks.counts[c10::toString(op.operator_name())]++;
  }
  at::native::cpu_fallback(op, stack);
}

using Change = std::function<Tensor(const Tensor&)>;

// Replace each tensor of an argument by `change` of it, and a device by `device`.
IValue replaced(const IValue& value, const Change& change, c10::Device device) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> out;
    for (const Tensor& each : value.toTensorVector()) out.push_back(change(each));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> out;
    for (const std::optional<Tensor>& each : value.toOptionalTensorVector())
      out.push_back(each && each->defined() ? std::optional<Tensor>(change(*each)) : std::nullopt);
    return out;
  }
  return value.isDevice() ? IValue(device) : value;
}

Stack all_replaced(at::ArrayRef<IValue> values, const Change& change, c10::Device device) {
  Stack out;
  for (const auto& value : values) out.push_back(replaced(value, change, device));
  return out;
}

void each_tensor(at::ArrayRef<IValue> values, const std::function<void(const Tensor&)>& visit) {
  for (const auto& value : values) {
    auto visited = [&](const Tensor& tensor) { return visit(tensor), tensor; };
    replaced(value, visited, c10::kCPU);
  }
}

Tensor shape_of(const Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta).requires_grad(false));
}

bool computable_later(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  if (op.hasTag(at::Tag::nondeterministic_seeded)) return false;  // host and device would draw in any order
  for (const auto& argument : schema.returns()) {
    const auto& type = argument.type();
    if (!type->isSubtypeOf(*c10::TensorType::get()) && !type->isSubtypeOf(*c10::ListType::ofTensors())) return false;
    TORCH_CHECK(!argument.alias_info() || argument.alias_info()->isWrite(), "simulated accelerator: it has no view ",
                c10::toString(op.operator_name()));
  }
  std::lock_guard<std::mutex> guard(fallbacks.mutex);
  return !shapeless.count(c10::toString(op.operator_name()));
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

// autograd starts its threads, one for each device that it knows, in the first backward pass of a process.
struct Engine : torch::autograd::Engine {
  static void check() {
    auto& engine = torch::autograd::Engine::get_default_engine();
    auto has_started = [&] { return bool(engine.*(&Engine::thread_pool_shared_)); };
    auto knows = [&] { return !(engine.*(&Engine::device_ready_queues_)).empty(); };
    if (!has_started() || knows()) return;
    engine.initialize_device_threads_pool();  // another thread may be starting it: wait for that
    TORCH_CHECK(knows(), "simulated accelerator: it was loaded after the first backward pass of this process, and "
                         "torch's autograd knows only the devices from before: call minidl.device.sim.use() earlier");
  }
};

// Whether `op` returns only tensors that it is given, none of which is empty.
bool only_writes(const c10::FunctionSchema& schema, at::ArrayRef<IValue> given) {
  bool only = true;
  for (const auto& result : schema.returns()) only = only && result.alias_info();
  for (size_t i = 0; i < given.size(); i++)
    if (is_written(schema.arguments()[i]))
      each_tensor(given[i], [&](const Tensor& tensor) { only = only && tensor.numel() > 0; });
  return only;
}

// Enqueue `op` in the current stream; its results, which are not computed yet, replace its arguments on the stack.
void launch(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  auto count = schema.arguments().size();
  std::vector<IValue> given(stack->end() - count, stack->end());
  std::optional<c10::Device> device;
  each_tensor(given, [&](const Tensor& tensor) {
    if (!on_sim(tensor)) return;
    if (tensor.requires_grad() && at::GradMode::is_enabled()) Engine::check();
    TORCH_CHECK(!device || *device == tensor.device(), "simulated accelerator: ", c10::toString(op.operator_name()),
                " has tensors on two devices, ", *device, " and ", tensor.device());
    device = tensor.device();
  });
  if (!device || !computable_later(op)) return run_at_once(op, stack);
  each_tensor(given, [&](const Tensor& tensor) {
    TORCH_CHECK(on_sim(tensor) || tensor.dim() == 0 || op.operator_name().name.find("index") != std::string::npos,
                "simulated accelerator: ", c10::toString(op.operator_name()), " has tensors on ", *device, " and on ",
                tensor.device(), ": the device cannot read the host's memory, nor the host the device's");
  });

  // Where all results are given (in place, out=), the shapes are known, unless an out= is empty and to be resized.
  auto shapes = all_replaced(given, shape_of, c10::kMeta);
  const auto inputs = shapes;  // an operator with out= resizes these
  if (!only_writes(schema, given)) {
    try {
      op.callBoxed(&shapes);
    } catch (const c10::NotImplementedError&) {
      std::lock_guard<std::mutex> guard(fallbacks.mutex);
      shapeless.insert(c10::toString(op.operator_name()));
      shapes.clear();
    } catch (const std::exception&) {  // the CPU's operator says what is wrong
      shapes.clear();
    }
    if (shapes.size() != schema.returns().size()) return run_at_once(op, stack);
  }

  Stack results;
  std::vector<Tensor> targets;  // of the operator's new tensors, in order
  auto make = [&](const Tensor& shape) {
    auto made = empty_strided(shape.sizes(), shape.strides(), shape.scalar_type(), *device);
    targets.push_back(view_of(made));
    return made;
  };
  size_t written = 0;  // the arguments that are written to are returned in their order
  for (size_t i = 0; i < schema.returns().size(); i++) {
    if (!schema.returns()[i].alias_info()) {
      results.push_back(replaced(shapes[i], make, *device));
      continue;
    }
    while (!is_written(schema.arguments()[written])) written++;
    if (inputs[written].isTensor() && given[written].toTensor().sizes() != inputs[written].toTensor().sizes())
      given[written].toTensor().resize_(inputs[written].toTensor().sizes());
    results.push_back(given[written++]);
  }

  auto view = [](const Tensor& tensor) { return on_sim(tensor) ? view_of(tensor) : tensor.clone(); };
  auto arguments = all_replaced(given, view, c10::kCPU);
  auto is_new = [op](size_t i) { return !op.schema().returns()[i].alias_info(); };
  states[device->index()].check();
  current(device->index()).run(KERNEL, settings["kernel"], 0, [=]() mutable {
    const auto kept = arguments;  // torch drops the arguments, and then reads the results of out= through them
    op.callBoxed(&arguments);
    auto target = targets.begin();
    for (size_t i = 0; i < arguments.size(); i++)
      if (is_new(i)) each_tensor(arguments[i], [&](const Tensor& result) { (target++)->copy_(result); });
  });
  torch::jit::drop(*stack, count);
  for (auto& result : results) stack->push_back(std::move(result));
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  launch(op, stack);
}

c10::OperatorHandle operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// torch asks accelerators that it does not know for convolutions under names of their own.
void convolution(const c10::OperatorHandle&, Stack* stack) {
  static auto op = operator_named("aten::convolution");
  launch(op, stack);
}

void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  static auto op = operator_named("aten::convolution_backward");
  auto weight = torch::jit::peek(*stack, 2, 10).toTensor();
  auto transposed = torch::jit::peek(*stack, 6, 10).toBool();
  auto groups = torch::jit::peek(*stack, 8, 10).toInt();
  auto channels = transposed ? weight.size(1) * groups : weight.size(0);
  stack->insert(stack->end() - 7, IValue(std::vector<int64_t>{channels}));  // the bias's size
  launch(op, stack);
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout> layout,
             std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard on(device.value_or(guard_impl.getDevice()));
  return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(type), format);
}

Tensor empty_with_strides(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> type,
                          std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  return empty_strided(size, stride, c10::dtype_or_default(type), device.value_or(guard_impl.getDevice()));
}

const Tensor& resize(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto bytes = (self.storage_offset() + c10::multiply_integers(size)) * self.element_size();
  if (bytes > self.storage().nbytes()) resize_bytes(self.storage().unsafeGetStorageImpl(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

at::Scalar item(const Tensor& self) {
  auto copy = at::empty({}, self.options().device(c10::kCPU));
  copy_from(self.reshape({}), copy, false);
  return at::_local_scalar_dense(copy);
}

void record_stream(Tensor& self, c10::Stream stream) {
  device_memory.recordStream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_with_strides);
  m.impl("resize_", &resize);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("record_stream", &record_stream);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

// --- For Python: torch.ops.minidl_sim ----------------------------------------------------------------------------------
void configure(std::string name, double value) {
  auto found = settings.find(name);
  TORCH_CHECK(found != settings.end(), "simulated accelerator: there is no setting '", name, "'");
  found->second = value;
}

double setting(std::string name) {
  return settings.at(name);
}

// Keep the current stream busy for so many ns, or until `wake`.
void sleep_for(int64_t ns) {
  current(current_device).run(SLEEP, 0, 0, [ns, seen = sleepers.count()] { sleepers.sleep(ns, seen); });
}

void fail(std::string why) {
  current(current_device).run(KERNEL, 0, 0, [=] { throw std::runtime_error(why); });
}

// Drop the work of all streams; a failed device skips it.
void repair() {
  for (auto& state : states) state.fail("its work was dropped");
  sleepers.wake();
  for (int device = 0; device < kDevices; device++) {
    for (int id = 0; id < kStreams; id++)
      if (auto& queue = queue_of(device, id); queue.started) queue.mark()->wait();
    std::lock_guard<std::mutex> guard(states[device].mutex);
    states[device].failure.clear();
  }
}

Tensor log(bool on) {
  std::lock_guard<std::mutex> guard(record.mutex);
  auto out = at::empty({int64_t(record.done.size()), 6}, at::TensorOptions(at::kLong));
  if (!record.done.empty()) memcpy(out.data_ptr(), record.done.data(), record.done.size() * sizeof(Done));
  record.done.clear();
  record.on = on;
  return out;
}

std::tuple<int64_t, int64_t> pinned_bytes(bool reset_peak) {
  std::lock_guard<std::mutex> guard(pinned.mutex);
  pinned.reclaim();
  std::tuple<int64_t, int64_t> out{pinned.bytes.current, pinned.bytes.peak};
  if (reset_peak) pinned.bytes.reset_peak();
  return out;
}

bool register_memory(int64_t address, int64_t size) {
  check_process();
  user = getpid();
  at::globalContext().lazyInitDevice(c10::kPrivateUse1);  // before, is_pinned() is false of all memory
  return registered_memory.add(reinterpret_cast<char*>(address), size);
}

bool unregister_memory(int64_t address) {
  check_process();
  return registered_memory.remove(reinterpret_cast<char*>(address));
}

std::tuple<int64_t, int64_t> registered_bytes() {
  std::lock_guard<std::mutex> guard(registered_memory.mutex);
  return {registered_memory.bytes, registered_memory.times};
}

c10::Dict<std::string, int64_t> fallback_counts() {
  std::lock_guard<std::mutex> guard(fallbacks.mutex);
  c10::Dict<std::string, int64_t> out;
  for (const auto& [name, times] : fallbacks.counts) out.insert(name, times);
  return out;
}

bool forked() {
  return !usable();
}

TORCH_LIBRARY(minidl_sim, m) {
  m.def("configure(str name, float value) -> ()", &configure);
  m.def("setting(str name) -> float", &setting);
  m.def("sleep(int ns) -> ()", &sleep_for);
  m.def("wake() -> ()", [] { sleepers.wake(); });
  m.def("fail(str why) -> ()", &fail);
  m.def("repair() -> ()", &repair);
  m.def("log(bool on) -> Tensor", &log);
  m.def("pinned_bytes(bool reset_peak) -> (int, int)", &pinned_bytes);
  m.def("register_memory(int address, int size) -> bool", &register_memory);
  m.def("unregister_memory(int address) -> bool", &unregister_memory);
  m.def("registered_bytes() -> (int, int)", &registered_bytes);
  m.def("fallbacks() -> Dict(str, int)", &fallback_counts);
  m.def("forked() -> bool", &forked);
}

const bool registered = [] {
  c10::SetAllocator(kSim, &device_memory);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace
