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
  failure_ = {};
  return ++scheduled_;
}

void Event::complete(uint64_t version, Failure failure) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    completed_ = std::max(completed_, version);
    if (failure) failure_ = std::move(failure);
    when_ = Clock::now();
  }
  changed_.notify_all();
}

bool Event::done() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return completed_ >= scheduled_;
}

Failure Event::wait(uint64_t version) const {
  WithoutPython waiting;
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return completed_ >= version; });
  Failure found = failure_;
  lock.unlock();  // before Python's lock is taken again
  return found;
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
    Failure failure;
    try {
      work();
    } catch (const Failure& known) {
      failure = known;
    } catch (...) {
      failure.error = std::current_exception();
    }
    work = nullptr;  // what the work referred to goes before the stream counts as finished
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (failure && !failure_) failure_ = std::move(failure);
      ++completed_;
    }
    finished_.notify_all();
  }
}

void Stream::settle() {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto target = enqueued_;
  if (completed_ >= target) return;
  lock.unlock();
  WithoutPython waiting;
  lock.lock();
  finished_.wait(lock, [&] { return completed_ >= target; });
  lock.unlock();  // before Python's lock is taken again
}

void Stream::drain() {
  settle();
  Failure found;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    found = std::exchange(failure_, {});
  }
  found.raise();
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
      event->complete(version, failure_);
      return;
    }
  }
  enqueue([this, event, version] {
    Failure failure;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      failure = failure_;
    }
    event->complete(version, failure);
  });
}

void Stream::wait_event(const EventPtr& event) {
  if (event->done()) return;
  enqueue([event, version = event->version()] {
    const auto failure = event->wait(version);
    if (failure) throw failure;
  });
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

namespace {
std::vector<Stream*> streams_of(DeviceIndex device) {
  auto& all = streams();
  std::lock_guard<std::mutex> lock(all.mutex);
  std::vector<Stream*> found;
  for (auto& entry : all.by_id[device]) found.push_back(entry.second.get());
  return found;
}
}  // namespace

void drain_device(DeviceIndex device) {
  for (auto* stream : streams_of(device)) stream->drain();
}

void settle_device(DeviceIndex device) {
  for (auto* stream : streams_of(device)) stream->settle();
}

void synchronize_device(DeviceIndex device) {
  ++counters().synchronizations;
  drain_device(device);
}

}  // namespace standin
