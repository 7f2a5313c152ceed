// The state of the stand-in device: memory that only kernels can address, streams with a worker thread each, events, and records of what ran.
//
// Everything here is made once and never destroyed: worker threads and tensors may outlive static objects at the end of a process.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace standin {

using Clock = std::chrono::steady_clock;
using c10::DeviceIndex;

constexpr int MAX_DEVICES = 16;
constexpr auto TYPE = c10::DeviceType::PrivateUse1;

// --- process ------------------------------------------------------------------------------------------------------------------

/// The number of devices that this process sees; reads the environment once and starts nothing.
int device_count();
/// Set the number of devices and their capacity, before the first use.
void configure(int devices, size_t capacity);
bool initialized();
/// True in a child that was forked after its parent had used the device.
bool in_bad_fork();
/// Map the memory of every device; called by whatever uses one.
void ensure_initialized();

DeviceIndex current_device();
DeviceIndex exchange_device(DeviceIndex index);
void check_device(int64_t index);

// --- records ------------------------------------------------------------------------------------------------------------------

struct Counters {
  std::atomic<int64_t> copies_to_device{0};
  std::atomic<int64_t> copies_to_host{0};
  std::atomic<int64_t> bytes_to_device{0};
  std::atomic<int64_t> bytes_to_host{0};
  std::atomic<int64_t> synchronizations{0};
  std::atomic<int64_t> kernels{0};
  std::atomic<int64_t> collectives{0};
};
Counters& counters();

struct LogEntry {
  std::string kind;  // "kernel", "to_device", "to_host", "collective"
  std::string name;
  int device;
  int64_t stream;
  int64_t bytes;
  double begin;  // seconds of the steady clock
  double end;
};
void set_logging(bool on);
bool logging();
void add_log(LogEntry entry);
std::vector<LogEntry> take_log();
double now();

/// Seconds that every asynchronous copy and every kernel waits before it runs.
void set_delay(double copies, double kernels);
double copy_delay();
double kernel_delay();

// --- streams and events -------------------------------------------------------------------------------------------------------

/// What failed on a stream. It is raised where the host next waits for that stream, unless it was dropped meanwhile: an aborted process
/// group leaves the streams usable.
struct Failure {
  std::exception_ptr error;
  std::shared_ptr<std::atomic<bool>> dropped;
  explicit operator bool() const { return error && !(dropped && *dropped); }
  void raise() const {
    if (*this) std::rethrow_exception(error);
  }
};

class Event {
 public:
  explicit Event(bool timing) : timing_(timing) {}
  uint64_t next_version();
  void complete(uint64_t version, Failure failure);
  bool done() const;
  /// Block the calling thread until `version` has completed; return what failed before it on its stream.
  Failure wait(uint64_t version) const;
  uint64_t version() const;
  Clock::time_point when() const;
  bool timing() const { return timing_; }

 private:
  const bool timing_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  uint64_t scheduled_ = 0;
  uint64_t completed_ = 0;
  Failure failure_;
  Clock::time_point when_{};
};
using EventPtr = std::shared_ptr<Event>;

/// A queue of work that runs in order. Work that is enqueued runs on the stream's own thread; kernels call `drain` and then run in the
/// thread of their caller.
class Stream {
 public:
  Stream(DeviceIndex device, int64_t id) : device_(device), id_(id) {}
  void enqueue(std::function<void()> work);
  /// Block the calling thread until everything that was enqueued has run; rethrow the first failure.
  void drain();
  /// The same, and leave failures for the next `drain`.
  void settle();
  bool idle() const;
  void record(const EventPtr& event);
  void wait_event(const EventPtr& event);
  DeviceIndex device() const { return device_; }
  int64_t id() const { return id_; }

 private:
  void run();
  const DeviceIndex device_;
  const int64_t id_;
  mutable std::mutex mutex_;
  std::condition_variable arrived_;
  std::condition_variable finished_;
  std::deque<std::function<void()>> queue_;
  uint64_t enqueued_ = 0;
  uint64_t completed_ = 0;
  bool started_ = false;
  Failure failure_;
};

Stream& stream_of(DeviceIndex device, int64_t id);
int64_t new_stream(DeviceIndex device);
int64_t pooled_stream(DeviceIndex device);
int64_t current_stream_id(DeviceIndex device);
int64_t exchange_stream(DeviceIndex device, int64_t id);
inline Stream& current_stream(DeviceIndex device) { return stream_of(device, current_stream_id(device)); }
/// Wait for every stream of a device. The host waits: it counts as a synchronisation.
void synchronize_device(DeviceIndex device);
void drain_device(DeviceIndex device);
void settle_device(DeviceIndex device);

/// Releases Python's lock while the calling thread waits: work on the streams may need it to drop references.
class WithoutPython {
 public:
  WithoutPython();
  ~WithoutPython();
  WithoutPython(const WithoutPython&) = delete;
  WithoutPython& operator=(const WithoutPython&) = delete;

 private:
  void* state_ = nullptr;
};

// --- memory -------------------------------------------------------------------------------------------------------------------

struct MemoryStats {
  size_t capacity = 0;
  size_t allocated = 0;
  size_t peak_allocated = 0;
  size_t reserved = 0;
  size_t peak_reserved = 0;
  int64_t allocations = 0;
  int64_t frees = 0;
  int64_t retries = 0;
  int64_t failures = 0;
};

/// Return the address through which kernels reach what a tensor's pointer names. The pointer itself can be neither read nor written.
void* kernel_address(const void* pointer);
/// The device of a pointer; -1 if it is not device memory.
int device_of_pointer(const void* pointer);
MemoryStats memory_stats(DeviceIndex device);
void reset_peak_memory(DeviceIndex device);
void set_capacity(DeviceIndex device, size_t bytes);
void empty_cache();
/// Note that a block is used by work on another stream, so that it is not reused before that work has run.
void record_stream(const void* pointer, DeviceIndex device, int64_t stream);
bool is_pinned(const void* pointer);

}  // namespace standin
