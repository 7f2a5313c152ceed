// Times of the device for torch's profiler: a pair of events around every operator.
#include <torch/csrc/profiler/stubs/base.h>

#include "device.h"

namespace standin {
namespace {

struct Profiler final : torch::profiler::impl::ProfilerStubs {
  using Stub = torch::profiler::impl::ProfilerVoidEventStub;

  void record(DeviceIndex* device, Stub* event, int64_t* host) const override {
    auto made = std::make_shared<Event>(true);
    const auto index = current_device();
    if (device != nullptr) *device = index;
    if (host != nullptr) *host = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
    current_stream(index).record(made);
    *event = made;
  }
  /// Microseconds between two events.
  float elapsed(const Stub* first, const Stub* second) const override {
    const auto begin = std::static_pointer_cast<Event>(*first);
    const auto end = std::static_pointer_cast<Event>(*second);
    begin->wait(begin->version());
    end->wait(end->version());
    return std::chrono::duration<float, std::micro>(end->when() - begin->when()).count();
  }
  void mark(const char*) const override {}
  void rangePush(const char*) const override {}
  void rangePop() const override {}
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> operation) const override {
    const auto before = current_device();
    for (int device = 0; device < device_count(); ++device) {
      exchange_device(static_cast<DeviceIndex>(device));
      operation(device);
    }
    exchange_device(before);
  }
  void synchronize() const override {
    for (int device = 0; device < device_count(); ++device) settle_device(static_cast<DeviceIndex>(device));
  }
};

[[maybe_unused]] const bool registered = [] {
  torch::profiler::impl::registerPrivateUse1Methods(new Profiler());
  return true;
}();

}  // namespace
}  // namespace standin
