// What torch asks of a device family: guards (devices, streams, events), hooks, generators.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

#include "device.h"
#include "generator.h"

namespace standin {

c10::Allocator* pinned_allocator();

// --- generators ---------------------------------------------------------------------------------------------------------------

GeneratorImpl::GeneratorImpl(DeviceIndex device)
    : c10::GeneratorImpl(c10::Device(TYPE, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      inner_(at::detail::createCPUGenerator()) {}

GeneratorImpl* GeneratorImpl::clone_impl() const {
  auto* copy = new GeneratorImpl(device().index());
  copy->inner_ = inner_.clone();
  return copy;
}

const at::Generator& default_generator(DeviceIndex device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int index = 0; index < MAX_DEVICES; ++index) made->push_back(at::make_generator<GeneratorImpl>(static_cast<DeviceIndex>(index)));
    return made;
  }();
  const auto index = device < 0 ? current_device() : device;
  check_device(index);
  return (*all)[index];
}

// --- guards -------------------------------------------------------------------------------------------------------------------

namespace {

EventPtr& event_of(void* event) { return *static_cast<EventPtr*>(event); }

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device device) const override { return {TYPE, exchange_device(device.index())}; }
  c10::Device getDevice() const override { return {TYPE, current_device()}; }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < device_count()) exchange_device(device.index());
  }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(device_count()); }

  c10::Stream stream(c10::Device device, int64_t id) const {
    const auto index = device.has_index() ? device.index() : current_device();
    check_device(index);
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, index), id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(device, current_stream_id(device.has_index() ? device.index() : current_device()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return stream(device, pooled_stream(device.index())); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream(device, new_stream(device.has_index() ? device.index() : current_device()));
  }
  c10::Stream exchangeStream(c10::Stream other) const override {
    return stream(other.device(), exchange_stream(other.device_index(), other.id()));
  }
  void* getStreamNativeHandle(const c10::Stream other) const override { return &stream_of(other.device_index(), other.id()); }
  bool queryStream(const c10::Stream& other) const override { return stream_of(other.device_index(), other.id()).idle(); }
  void synchronizeStream(const c10::Stream& other) const override {
    ++counters().synchronizations;
    stream_of(other.device_index(), other.id()).drain();
  }
  void synchronizeDevice(const DeviceIndex device) const override { synchronize_device(device); }

  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<EventPtr*>(event); }
  void record(void** event, const c10::Stream& other, const DeviceIndex, const c10::EventFlag flag) const override {
    if (*event == nullptr) *event = new EventPtr(std::make_shared<Event>(flag == c10::EventFlag::BACKEND_DEFAULT));
    stream_of(other.device_index(), other.id()).record(event_of(*event));
  }
  void block(void* event, const c10::Stream& other) const override {
    if (event != nullptr) stream_of(other.device_index(), other.id()).wait_event(event_of(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || event_of(event)->done(); }
  void synchronizeEvent(void* event) const override {
    ++counters().synchronizations;
    if (event != nullptr) event_of(event)->wait(event_of(event)->version()).raise();
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr, "both events must have been recorded before elapsed_time");
    TORCH_CHECK(
        event_of(first)->timing() && event_of(second)->timing(), "make both events with enable_timing=True to measure between them");
    TORCH_CHECK(event_of(first)->done() && event_of(second)->done(), "both events must have completed before elapsed_time: synchronize first");
    return std::chrono::duration<double, std::milli>(event_of(second)->when() - event_of(first)->when()).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& other) const override {
    record_stream(pointer.get(), other.device_index(), other.id());
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl);

// --- hooks --------------------------------------------------------------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return initialized(); }
  void init() const override { ensure_initialized(); }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(device_count()); }
  void setCurrentDevice(DeviceIndex device) const override { exchange_device(device); }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return exchange_device(device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchange_device(device); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    const int device = device_of_pointer(pointer);
    TORCH_CHECK(device >= 0, "this pointer is not into the memory of a stand-in device");
    return {TYPE, static_cast<DeviceIndex>(device)};
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<GeneratorImpl>(device < 0 ? current_device() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    const c10::DeviceGuard guard(storage.device());
    auto made = c10::GetAllocator(TYPE)->allocate(bytes);
    current_stream(storage.device().index()).drain();
    const auto kept = std::min(bytes, impl->nbytes());
    if (kept > 0) std::memcpy(kernel_address(made.get()), kernel_address(impl->data()), kept);
    impl->set_data_ptr_noswap(std::move(made));
    impl->set_nbytes(bytes);
  }
};

[[maybe_unused]] const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace
}  // namespace standin
