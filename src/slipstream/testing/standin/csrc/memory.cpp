// Device memory: one file in memory per device, mapped twice. Tensors have addresses of the first mapping, which nobody may read or write;
// kernels use the second, which nobody else knows. So a host that touches device memory faults, at any time and on any thread.
#include "device.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <unordered_map>

namespace standin {

namespace {

constexpr size_t ROUND = 512;
constexpr size_t PAGE = 4096;
constexpr size_t SPAN = size_t(64) << 30;  // address space of a device; memory is committed when it is used

struct Block {
  char* pointer;
  size_t size;
  DeviceIndex device;
  int64_t stream;
  std::set<int64_t> users;  // further streams
  int waiting = 0;          // streams whose work must end before the block can be reused
};

struct Memory {
  std::mutex mutex;
  int file = -1;
  char* device_base = nullptr;
  char* kernel_base = nullptr;
  std::map<char*, size_t> unused;                             // by address: what no stream has
  std::map<int64_t, std::multimap<size_t, Block*>> cached;    // by stream and size: freed blocks
  std::unordered_map<void*, Block*> live;
  MemoryStats stats;
};

struct Process {
  std::mutex mutex;
  std::atomic<bool> initialized{false};
  std::atomic<bool> bad_fork{false};
  int devices = 4;
  size_t capacity = size_t(4) << 30;
  Memory memory[MAX_DEVICES];
};

Process& process() {
  static auto* state = new Process();
  return *state;
}

thread_local DeviceIndex the_current_device = 0;

struct sigaction previous_handler;

void write_text(const char* text) {
  [[maybe_unused]] auto ignored = ::write(STDERR_FILENO, text, std::strlen(text));
}

// Only calls that are allowed in a signal handler.
void on_fault(int signal, siginfo_t* info, void* context) {
  const int device = device_of_pointer(info->si_addr);
  if (device >= 0) {
    char name[] = "standin:00";
    name[8] = device < 10 ? static_cast<char>('0' + device) : '1';
    name[9] = device < 10 ? '\0' : static_cast<char>('0' + device - 10);
    write_text("\nslipstream stand-in: the host touched memory of ");
    write_text(name);
    write_text(
        ", as a GPU's memory cannot be. Something took the address of a tensor on the device and read or wrote it from the "
        "processor; copy the tensor with .cpu() first.\n");
  }
  sigaction(signal, &previous_handler, nullptr);  // the fault happens again, and goes to the handler before this one
  (void)context;
}

void map_device(Memory& memory, size_t capacity) {
  memory.file = memfd_create("standin", MFD_CLOEXEC);
  TORCH_CHECK(memory.file >= 0 && ftruncate(memory.file, SPAN) == 0, "the stand-in device got no memory: ", std::strerror(errno));
  void* device = mmap(nullptr, SPAN, PROT_NONE, MAP_SHARED | MAP_NORESERVE, memory.file, 0);
  void* kernel = mmap(nullptr, SPAN, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, memory.file, 0);
  TORCH_CHECK(device != MAP_FAILED && kernel != MAP_FAILED, "the stand-in device got no address space: ", std::strerror(errno));
  madvise(kernel, SPAN, MADV_DONTDUMP);
  memory.device_base = static_cast<char*>(device);
  memory.kernel_base = static_cast<char*>(kernel);
  memory.unused = {{memory.device_base, SPAN}};
  memory.stats.capacity = capacity;
}

size_t rounded(size_t bytes) { return (bytes + ROUND - 1) / ROUND * ROUND; }

char* take_unused(Memory& memory, size_t size) {
  if (memory.stats.reserved + size > memory.stats.capacity) return nullptr;
  for (auto entry = memory.unused.begin(); entry != memory.unused.end(); ++entry) {
    if (entry->second < size) continue;
    auto [pointer, length] = *entry;
    memory.unused.erase(entry);
    if (length > size) memory.unused[pointer + size] = length - size;
    memory.stats.reserved += size;
    memory.stats.peak_reserved = std::max(memory.stats.peak_reserved, memory.stats.reserved);
    return pointer;
  }
  return nullptr;
}

void give_back(Memory& memory, Block* block) {
  memory.stats.reserved -= block->size;
  char* pointer = block->pointer;
  size_t size = block->size;
  auto after = memory.unused.upper_bound(pointer);
  if (after != memory.unused.end() && after->first == pointer + size) {
    size += after->second;
    after = memory.unused.erase(after);
  }
  if (after != memory.unused.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second == pointer) {
      pointer = before->first;
      size += before->second;
      memory.unused.erase(before);
    }
  }
  memory.unused[pointer] = size;
  const size_t first = (block->pointer - memory.device_base + PAGE - 1) / PAGE * PAGE;
  const size_t last = (block->pointer - memory.device_base + block->size) / PAGE * PAGE;
  if (last > first) fallocate(memory.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, first, last - first);
  delete block;
}

void release_cached(Memory& memory) {
  for (auto& [stream, blocks] : memory.cached) {
    for (auto& [size, block] : blocks) give_back(memory, block);
  }
  memory.cached.clear();
}

Block* take_cached(Memory& memory, int64_t stream, size_t size) {
  auto& blocks = memory.cached[stream];
  auto found = blocks.lower_bound(size);
  if (found == blocks.end() || found->first > size + size / 4 + 4096) return nullptr;
  Block* block = found->second;
  blocks.erase(found);
  return block;
}

Block* allocate_block(DeviceIndex device, size_t bytes) {
  auto& memory = process().memory[device];
  const auto stream = current_stream_id(device);
  const size_t size = rounded(bytes);
  std::unique_lock<std::mutex> lock(memory.mutex);
  Block* block = take_cached(memory, stream, size);
  if (block == nullptr) {
    char* pointer = take_unused(memory, size);
    if (pointer == nullptr) {
      ++memory.stats.retries;
      lock.unlock();
      settle_device(device);
      lock.lock();
      release_cached(memory);
      pointer = take_unused(memory, size);
    }
    if (pointer == nullptr) {
      ++memory.stats.failures;
      const auto stats = memory.stats;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "standin:", int(device), " is out of memory: ", bytes, " bytes were asked for, ", stats.allocated,
          " of ", stats.capacity, " bytes are in use, ", stats.capacity - std::min(stats.capacity, stats.reserved), " are free");
    }
    block = new Block{pointer, size, device, stream, {}, 0};
  }
  block->stream = stream;
  memory.live[block->pointer] = block;
  ++memory.stats.allocations;
  memory.stats.allocated += block->size;
  memory.stats.peak_allocated = std::max(memory.stats.peak_allocated, memory.stats.allocated);
  return block;
}

void to_cache(Block* block) {
  auto& memory = process().memory[block->device];
  memory.cached[block->stream].emplace(block->size, block);
}

void free_block(void* context) {
  if (in_bad_fork()) return;
  auto* block = static_cast<Block*>(context);
  auto& memory = process().memory[block->device];
  std::set<int64_t> users;
  {
    std::lock_guard<std::mutex> lock(memory.mutex);
    memory.live.erase(block->pointer);
    memory.stats.allocated -= block->size;
    ++memory.stats.frees;
    users.swap(block->users);
    block->waiting = static_cast<int>(users.size());
    if (users.empty()) to_cache(block);
  }
  for (auto user : users) {
    stream_of(block->device, user).enqueue([block, &memory] {
      std::lock_guard<std::mutex> lock(memory.mutex);
      if (--block->waiting == 0) to_cache(block);
    });
  }
}

using Stats = c10::CachingAllocator::StatArray;

void set_stat(Stats& stat, int64_t current, int64_t peak) {
  auto& aggregate = stat[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  aggregate.current = current;
  aggregate.peak = peak;
}

struct DeviceMemoryAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    ensure_initialized();
    const auto device = current_device();
    const c10::Device where(TYPE, device);
    if (bytes == 0) return {nullptr, nullptr, &free_block, where};
    auto* block = allocate_block(device, bytes);
    return {block->pointer, block, &free_block, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(kernel_address(to), kernel_address(from), bytes);
  }
  bool initialized() override { return standin::initialized(); }
  void emptyCache(c10::MempoolId_t) override { empty_cache(); }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    record_stream(pointer.get(), stream.device_index(), stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    const auto stats = memory_stats(device);
    c10::CachingDeviceAllocator::DeviceStats result;
    set_stat(result.allocated_bytes, stats.allocated, stats.peak_allocated);
    set_stat(result.active_bytes, stats.allocated, stats.peak_allocated);
    set_stat(result.requested_bytes, stats.allocated, stats.peak_allocated);
    set_stat(result.reserved_bytes, stats.reserved, stats.peak_reserved);
    set_stat(result.allocation, stats.allocations - stats.frees, stats.allocations);
    result.num_alloc_retries = stats.retries;
    result.num_ooms = stats.failures;
    return result;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override { reset_peak_memory(device); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    const auto stats = memory_stats(device);
    return {stats.capacity - std::min(stats.capacity, stats.reserved), stats.capacity};
  }
};

DeviceMemoryAllocator& device_allocator() {
  static auto* allocator = new DeviceMemoryAllocator();
  return *allocator;
}

[[maybe_unused]] const bool registered = [] {
  c10::SetAllocator(TYPE, &device_allocator(), 0);
  return true;
}();

// --- pinned host memory -------------------------------------------------------------------------------------------------------

struct Pinned {
  std::mutex mutex;
  std::map<const char*, size_t> ranges;
};

Pinned& pinned() {
  static auto* all = new Pinned();
  return *all;
}

void free_pinned(void* pointer) {
  if (pointer == nullptr) return;
  {
    std::lock_guard<std::mutex> lock(pinned().mutex);
    pinned().ranges.erase(static_cast<const char*>(pointer));
  }
  std::free(pointer);
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = nullptr;
    if (bytes > 0) {
      TORCH_CHECK(posix_memalign(&pointer, 64, bytes) == 0, "no host memory for ", bytes, " pinned bytes");
      std::lock_guard<std::mutex> lock(pinned().mutex);
      pinned().ranges[static_cast<const char*>(pointer)] = bytes;
    }
    return {pointer, pointer, &free_pinned, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
  /// Nothing is kept for reuse, and late copies hold their host memory themselves: there is nothing to note or to give back.
  bool record_event(void* pointer, void*, c10::Stream) override { return is_pinned(pointer); }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

PinnedAllocator& the_pinned_allocator() {
  static auto* allocator = new PinnedAllocator();
  return *allocator;
}

[[maybe_unused]] const bool pinned_registered = [] {
  at::setHostAllocator(TYPE, &the_pinned_allocator());
  return true;
}();

}  // namespace

c10::Allocator* pinned_allocator() { return &the_pinned_allocator(); }

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(pinned().mutex);
  auto after = pinned().ranges.upper_bound(static_cast<const char*>(pointer));
  if (after == pinned().ranges.begin()) return false;
  auto range = std::prev(after);
  return static_cast<const char*>(pointer) < range->first + range->second;
}

// --- the process --------------------------------------------------------------------------------------------------------------

void configure(int devices, size_t capacity) {
  std::lock_guard<std::mutex> lock(process().mutex);
  TORCH_CHECK(!process().initialized, "the stand-in devices are in use; configure them before the first use");
  TORCH_CHECK(devices >= 0 && devices <= MAX_DEVICES, "there can be 0 to ", MAX_DEVICES, " stand-in devices, not ", devices);
  process().devices = devices;
  process().capacity = capacity;
}

int device_count() { return process().devices; }
bool initialized() { return process().initialized && !process().bad_fork; }
bool in_bad_fork() { return process().bad_fork; }

void ensure_initialized() {
  auto& state = process();
  TORCH_CHECK(
      !state.bad_fork,
      "this process was forked from one that had used the stand-in device, which cannot be used in both; start it with the method spawn");
  if (state.initialized) return;
  std::lock_guard<std::mutex> lock(state.mutex);
  if (state.initialized) return;
  for (int device = 0; device < state.devices; ++device) map_device(state.memory[device], state.capacity);
  struct sigaction handler = {};
  handler.sa_sigaction = &on_fault;
  handler.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &handler, &previous_handler);
  pthread_atfork(nullptr, nullptr, [] { process().bad_fork = true; });
  state.initialized = true;
}

DeviceIndex current_device() { return the_current_device; }

void check_device(int64_t index) {
  TORCH_CHECK(
      index >= 0 && index < device_count(), "there is no device standin:", index, ": this process sees ", device_count(),
      " stand-in devices, from standin:0");
}

DeviceIndex exchange_device(DeviceIndex index) {
  check_device(index);
  return std::exchange(the_current_device, index);
}

// --- memory -------------------------------------------------------------------------------------------------------------------

int device_of_pointer(const void* pointer) {
  auto& state = process();
  if (!state.initialized) return -1;
  const auto* address = static_cast<const char*>(pointer);
  for (int device = 0; device < state.devices; ++device) {
    const auto* base = state.memory[device].device_base;
    if (address >= base && address < base + SPAN) return device;
  }
  return -1;
}

void* kernel_address(const void* pointer) {
  if (pointer == nullptr) return nullptr;
  const int device = device_of_pointer(pointer);
  TORCH_INTERNAL_ASSERT(device >= 0, "a tensor of the stand-in device points into other memory");
  auto& memory = process().memory[device];
  return memory.kernel_base + (static_cast<const char*>(pointer) - memory.device_base);
}

MemoryStats memory_stats(DeviceIndex device) {
  check_device(device);
  if (!initialized()) {
    MemoryStats stats;
    stats.capacity = process().capacity;
    return stats;
  }
  std::lock_guard<std::mutex> lock(process().memory[device].mutex);
  return process().memory[device].stats;
}

void reset_peak_memory(DeviceIndex device) {
  check_device(device);
  auto& memory = process().memory[device];
  std::lock_guard<std::mutex> lock(memory.mutex);
  memory.stats.peak_allocated = memory.stats.allocated;
  memory.stats.peak_reserved = memory.stats.reserved;
}

void set_capacity(DeviceIndex device, size_t bytes) {
  check_device(device);
  ensure_initialized();
  auto& memory = process().memory[device];
  std::lock_guard<std::mutex> lock(memory.mutex);
  memory.stats.capacity = std::min(bytes, SPAN);
}

void empty_cache() {
  if (!initialized()) return;
  for (int device = 0; device < device_count(); ++device) {
    settle_device(static_cast<DeviceIndex>(device));
    std::lock_guard<std::mutex> lock(process().memory[device].mutex);
    release_cached(process().memory[device]);
  }
}

void record_stream(const void* pointer, DeviceIndex device, int64_t stream) {
  auto& memory = process().memory[device];
  std::lock_guard<std::mutex> lock(memory.mutex);
  auto found = memory.live.find(const_cast<void*>(pointer));
  if (found != memory.live.end() && found->second->stream != stream) found->second->users.insert(stream);
}

}  // namespace standin
