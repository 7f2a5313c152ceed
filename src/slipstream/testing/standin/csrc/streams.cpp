// Streams, events, counters and the log.
#include "device.h"

#include <Python.h>
#include <c10/util/Exception.h>

#include <map>
#include <thread>

namespace standin {

namespace {

constexpr int64_t POOL = 8;

struct Streams {
  std::mutex mutex;
  std::map<int64_t, std::unique_ptr<Stream>> by_id[MAX_DEVICES];
  int64_t next[MAX_DEVICES] = {};
  std::atomic<uint64_t> turn{0};
};

Streams& streams() {
  static auto* all = new Streams();
  return *all;
}

struct Log {
  std::mutex mutex;
  std::vector<LogEntry> entries;
  std::atomic<bool> on{false};
};

Log& the_log() {
  static auto* log = new Log();
  return *log;
}

std::atomic<double> delay_of_copies{0.0002};
std::atomic<double> delay_of_kernels{0.0};

struct CurrentStreams {
  int64_t id[MAX_DEVICES] = {};
};
thread_local CurrentStreams current_streams;

}  // namespace

Counters& counters() {
  static auto* all = new Counters();
  return *all;
}

double now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

void set_logging(bool on) { the_log().on = on; }
bool logging() { return the_log().on; }

void add_log(LogEntry entry) {
  std::lock_guard<std::mutex> lock(the_log().mutex);
  the_log().entries.push_back(std::move(entry));
}

std::vector<LogEntry> take_log() {
  std::lock_guard<std::mutex> lock(the_log().mutex);
  return std::exchange(the_log().entries, {});
}

void set_delay(double copies, double kernels) {
  delay_of_copies = copies;
  delay_of_kernels = kernels;
}
double copy_delay() { return delay_of_copies; }
double kernel_delay() { return delay_of_kernels; }

WithoutPython::WithoutPython() {
  if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
}
WithoutPython::~WithoutPython() {
  if (state_ != nullptr) PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
}

// --- events -------------------------------------------------------------------------------------------------------------------

uint64_t Event::next_version() {
  std::lock_guard<std::mutex> lock(mutex_);
  error_ = nullptr;
  return ++scheduled_;
}

void Event::complete(uint64_t version, std::exception_ptr error) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    completed_ = std::max(completed_, version);
    if (error) error_ = error;
    when_ = Clock::now();
  }
  changed_.notify_all();
}

bool Event::done() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return completed_ >= scheduled_;
}

void Event::wait(uint64_t version) const {
  std::exception_ptr error;
  {
    WithoutPython waiting;
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return completed_ >= version; });
    error = error_;
  }
  if (error) std::rethrow_exception(error);
}

uint64_t Event::version() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return scheduled_;
}

Clock::time_point Event::when() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return when_;
}

// --- streams ------------------------------------------------------------------------------------------------------------------

void Stream::enqueue(std::function<void()> work) {
  std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back(std::move(work));
  ++enqueued_;
  if (!started_) {
    started_ = true;
    std::thread([this] { run(); }).detach();
  }
  arrived_.notify_one();
}

void Stream::run() {
  for (;;) {
    std::function<void()> work;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      arrived_.wait(lock, [this] { return !queue_.empty(); });
      work = std::move(queue_.front());
      queue_.pop_front();
    }
    std::exception_ptr error;
    try {
      work();
    } catch (...) {
      error = std::current_exception();
    }
    work = nullptr;  // what the work referred to goes before the stream counts as finished
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (error && !error_) error_ = error;
      ++completed_;
    }
    finished_.notify_all();
  }
}

void Stream::drain() {
  std::exception_ptr error;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (completed_ < enqueued_) {
      const auto target = enqueued_;
      lock.unlock();
      WithoutPython waiting;
      lock.lock();
      finished_.wait(lock, [&] { return completed_ >= target; });
      error = std::exchange(error_, nullptr);
      lock.unlock();
    } else {
      error = std::exchange(error_, nullptr);
    }
  }
  if (error) std::rethrow_exception(error);
}

bool Stream::idle() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return completed_ >= enqueued_;
}

void Stream::record(const EventPtr& event) {
  const auto version = event->next_version();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (completed_ >= enqueued_) {
      event->complete(version, error_);
      return;
    }
  }
  enqueue([this, event, version] {
    std::exception_ptr error;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      error = error_;
    }
    event->complete(version, error);
  });
}

void Stream::wait_event(const EventPtr& event) {
  if (event->done()) return;
  enqueue([event, version = event->version()] { event->wait(version); });
}

Stream& stream_of(DeviceIndex device, int64_t id) {
  auto& all = streams();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto& found = all.by_id[device][id];
  if (!found) found = std::make_unique<Stream>(device, id);
  return *found;
}

int64_t new_stream(DeviceIndex device) {
  auto& all = streams();
  std::lock_guard<std::mutex> lock(all.mutex);
  return POOL + 1 + all.next[device]++;
}

int64_t pooled_stream(DeviceIndex) { return 1 + static_cast<int64_t>(streams().turn++ % POOL); }

int64_t current_stream_id(DeviceIndex device) { return current_streams.id[device]; }

int64_t exchange_stream(DeviceIndex device, int64_t id) { return std::exchange(current_streams.id[device], id); }

void drain_device(DeviceIndex device) {
  std::vector<Stream*> found;
  {
    auto& all = streams();
    std::lock_guard<std::mutex> lock(all.mutex);
    for (auto& entry : all.by_id[device]) found.push_back(entry.second.get());
  }
  for (auto* stream : found) stream->drain();
}

void synchronize_device(DeviceIndex device) {
  ++counters().synchronizations;
  drain_device(device);
}

}  // namespace standin
