// Operators. Each waits for what is before it on its stream and then runs the kernel of the CPU on the device's memory, in the caller's
// thread. Copies between host and device are the exception: with `non_blocking` they run on the stream's own thread, late.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <thread>

#include "device.h"
#include "generator.h"

namespace standin {

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

bool on_device(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == TYPE; }

void pause(double seconds) {
  if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

/// Tensors of the host over the memory of device tensors, for one call; tensors that share storage go on sharing it.
class HostViews {
 public:
  Tensor view(const Tensor& tensor) {
    auto* impl = tensor.unsafeGetTensorImpl();
    c10::Storage storage = storage_for(tensor.storage());
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(impl->sizes(), impl->strides(), impl->storage_offset());
    made._set_conj(tensor.is_conj());
    made._set_neg(tensor.is_neg());
    return made;
  }

  /// The device storage whose memory a storage of the host shows; null if it is the host's own.
  const c10::Storage* origin(const c10::Storage& host) const {
    for (const auto& [device, view] : known_) {
      if (view.unsafeGetStorageImpl() == host.unsafeGetStorageImpl()) return &device;
    }
    return nullptr;
  }

 private:
  c10::Storage storage_for(const c10::Storage& storage) {
    for (const auto& [device, view] : known_) {
      if (device.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) return view;
    }
    c10::DataPtr pointer(kernel_address(storage.data()), c10::DeviceType::CPU);
    c10::Storage view(
        c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(pointer), c10::GetAllocator(c10::DeviceType::CPU), /*resizable=*/true);
    known_.emplace_back(storage, view);
    return view;
  }
  std::vector<std::pair<c10::Storage, c10::Storage>> known_;
};

Tensor empty_on(c10::Device device, c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType type) {
  const c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      sizes, strides, c10::GetAllocator(TYPE), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
}

Tensor to_device_memory(const Tensor& host, c10::Device device) {
  TORCH_CHECK(
      host.layout() == c10::kStrided, "the stand-in device has tensors with strides only; this operator made one with the layout ", host.layout());
  const Tensor plain = host.resolve_conj().resolve_neg();
  const Tensor dense = plain.is_non_overlapping_and_dense() ? plain : plain.contiguous();
  Tensor made = empty_on(device, dense.sizes(), dense.strides(), dense.scalar_type());
  if (dense.nbytes() > 0) std::memcpy(kernel_address(made.data_ptr()), dense.const_data_ptr(), dense.nbytes());
  return made;
}

// --- the call of one operator ---------------------------------------------------------------------------------------------------

bool is_one_of(const std::string& name, std::initializer_list<const char*> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// Whether an argument may be on the host beside tensors of the device, as on GPUs: single numbers, unless they are written or are
/// positions; lists of indices; lengths of sequences.
bool may_be_on_host(const std::string& name, const c10::Argument& argument, const Tensor& tensor, bool one_of_indices) {
  if (one_of_indices)
    return is_one_of(name, {"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index", "aten::index_put"});
  if (name == "aten::_pack_padded_sequence") return true;
  if (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) return false;
  if (argument.name() == "index") return false;
  if (argument.name() == "target" && is_one_of(name, {"aten::nll_loss_forward", "aten::nll_loss2d_forward"})) return false;
  return tensor.dim() == 0;
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack) : op_(op), schema_(op.schema()), stack_(stack) {
    first_ = stack->size() - schema_.arguments().size();
    find_device();
  }

  void run() {
    ensure_initialized();
    const c10::DeviceGuard guard(device_);
    auto& stream = current_stream(device_.index());
    stream.drain();
    ++counters().kernels;
    if (reads_back()) ++counters().synchronizations;
    replace_arguments();
    const double begin = logging() ? now() : 0;
    pause(kernel_delay());
    redispatch();
    if (logging()) add_log({"kernel", schema_.name(), device_.index(), stream.id(), 0, begin, now()});
    update_written();
    restore_results();
  }

 private:
  template <class Function>
  void each_tensor(Function function) {
    for (size_t index = 0; index < schema_.arguments().size(); ++index) {
      const auto& value = (*stack_)[first_ + index];
      const auto& argument = schema_.arguments()[index];
      if (value.isTensor()) {
        function(value.toTensor(), argument, false);
      } else if (value.isTensorList()) {
        for (const Tensor& tensor : value.toTensorVector()) function(tensor, argument, false);
      } else if (value.isList()) {  // a list of tensors, some of which may be missing
        for (const IValue& entry : value.toListRef()) {
          if (entry.isTensor()) function(entry.toTensor(), argument, true);
        }
      }
    }
  }

  void find_device() {
    std::optional<c10::Device> found;
    std::optional<c10::Device> other;
    each_tensor([&](const Tensor& tensor, const c10::Argument& argument, bool one_of_indices) {
      if (!tensor.defined()) return;
      if (on_device(tensor)) {
        if (!found) found = tensor.device();
        if (tensor.device() != *found) other = tensor.device();
      } else if (!may_be_on_host(schema_.name(), argument, tensor, one_of_indices)) {
        other = tensor.device();
      }
    });
    TORCH_CHECK(
        !found || !other, schema_.name(), " got tensors on ", *found, " and on ", *other,
        "; move them to one device first: the memory of one cannot be read by the other");
    for (size_t index = 0; !found && index < schema_.arguments().size(); ++index) {
      const auto& value = (*stack_)[first_ + index];
      if (value.isDevice() && value.toDevice().type() == TYPE) found = value.toDevice();
      if (value.isGenerator() && value.toGenerator().device().type() == TYPE) found = value.toGenerator().device();
    }
    const auto index = found && found->has_index() ? found->index() : current_device();
    device_ = c10::Device(TYPE, index);
  }

  /// Whether the host learns something that a kernel computes, for which it has to wait.
  bool reads_back() const {
    for (const auto& result : schema_.returns()) {
      const auto kind = result.type()->kind();
      if (kind == c10::TypeKind::BoolType || kind == c10::TypeKind::IntType || kind == c10::TypeKind::FloatType || kind == c10::TypeKind::NumberType)
        return true;
    }
    return op_.hasTag(at::Tag::dynamic_output_shape) || op_.hasTag(at::Tag::data_dependent_output);
  }

  Tensor replaced(const Tensor& tensor) {
    if (!on_device(tensor)) return tensor;
    Tensor host = views_.view(tensor);
    pairs_.emplace_back(tensor, host);
    return host;
  }

  void replace_arguments() {
    for (size_t index = 0; index < schema_.arguments().size(); ++index) {
      auto& value = (*stack_)[first_ + index];
      if (value.isTensor()) {
        value = replaced(value.toTensor());
      } else if (value.isTensorList()) {
        std::vector<Tensor> list;
        for (const Tensor& tensor : value.toTensorVector()) list.push_back(replaced(tensor));
        value = IValue(std::move(list));
      } else if (value.isList()) {
        replace_optional_tensors(value);
      } else if (value.isDevice() && value.toDevice().type() == TYPE) {
        value = c10::Device(c10::DeviceType::CPU);
      } else if (value.isGenerator()) {
        const auto place = value.toGenerator().device();
        TORCH_CHECK(
            place == device_, schema_.name(), " draws numbers on ", device_, " and got a generator of ", place,
            "; make it with torch.Generator(device=\"", device_, "\")");
        value = value.toGenerator().get<GeneratorImpl>()->inner();
      }
    }
  }

  void replace_optional_tensors(IValue& value) {
    const auto entries = value.toListRef();
    if (std::none_of(entries.begin(), entries.end(), [](const IValue& entry) { return entry.isTensor(); })) return;
    c10::List<std::optional<Tensor>> list;
    for (const IValue& entry : entries) list.push_back(entry.isTensor() ? std::make_optional(replaced(entry.toTensor())) : std::nullopt);
    value = IValue(list);
  }

  /// Call the kernel of the CPU. Random numbers come from the generator of the device: where none is given, the kernel would take the
  /// CPU's default, so for the time of the call that has the device's state.
  void redispatch() {
    const c10::DispatchKeySet keys(c10::DispatchKey::CPU);
    if (is_convolution()) return;
    if (!op_.hasTag(at::Tag::nondeterministic_seeded)) {
      op_.redispatchBoxed(keys, stack_);
      return;
    }
    static auto* mutex = new std::mutex();
    std::lock_guard<std::mutex> lock(*mutex);
    auto& host = *at::detail::getDefaultCPUGenerator().get<at::CPUGeneratorImpl>();
    auto& own = default_generator(device_.index()).get<GeneratorImpl>()->engine();
    swap_states(host, own);
    try {
      op_.redispatchBoxed(keys, stack_);
    } catch (...) {
      swap_states(host, own);
      throw;
    }
    swap_states(host, own);
  }

  /// Convolutions reach a device from outside under names of their own, which the CPU does not have: call the usual ones.
  bool is_convolution() {
    const auto& name = schema_.name();
    if (name == "aten::convolution_overrideable") {
      call_instead("aten::convolution");
      return true;
    }
    if (name != "aten::convolution_backward_overrideable") return false;
    const auto arguments = stack_->begin() + static_cast<std::ptrdiff_t>(first_);
    const Tensor weight = arguments[2].toTensor();
    const bool transposed = arguments[6].toBool();
    const int64_t channels = transposed ? weight.size(1) * arguments[8].toInt() : weight.size(0);
    stack_->insert(arguments + 3, IValue(std::vector<int64_t>{channels}));
    call_instead("aten::convolution_backward");
    return true;
  }

  void call_instead(const char* name) {
    const auto other = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
    other.callBoxed(stack_);
  }

  static void swap_states(at::CPUGeneratorImpl& one, at::CPUGeneratorImpl& other) {
    const auto engine = one.engine();
    const auto single = one.next_float_normal_sample();
    const auto twice = one.next_double_normal_sample();
    one.set_engine(other.engine());
    one.set_next_float_normal_sample(other.next_float_normal_sample());
    one.set_next_double_normal_sample(other.next_double_normal_sample());
    other.set_engine(engine);
    other.set_next_float_normal_sample(single);
    other.set_next_double_normal_sample(twice);
  }

  /// What the kernel wrote to is in place already, unless it resized a tensor.
  void update_written() {
    for (auto& [tensor, host] : pairs_) {
      auto* impl = tensor.unsafeGetTensorImpl();
      const auto& storage = host.storage();
      if (storage.data() != kernel_address(tensor.storage().data()) || storage.nbytes() != tensor.storage().nbytes()) {
        at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), storage.nbytes());
        if (storage.nbytes() > 0) std::memcpy(kernel_address(tensor.storage().data()), storage.data(), storage.nbytes());
      }
      if (!impl->sizes().equals(host.sizes()) || !impl->strides().equals(host.strides()) || impl->storage_offset() != host.storage_offset())
        impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }

  Tensor restored(const Tensor& result) {
    if (!result.defined()) return result;
    for (const auto& [tensor, host] : pairs_) {
      if (host.unsafeGetTensorImpl() == result.unsafeGetTensorImpl()) return tensor;
    }
    if (result.layout() == c10::kStrided && result.has_storage()) {
      if (const auto* storage = views_.origin(result.storage())) return view_of(*storage, result);
    }
    return to_device_memory(result, device_);
  }

  Tensor view_of(const c10::Storage& storage, const Tensor& result) const {
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), result.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
    made._set_conj(result.is_conj());
    made._set_neg(result.is_neg());
    return made;
  }

  void restore_results() {
    const size_t begin = stack_->size() - schema_.returns().size();
    for (size_t index = begin; index < stack_->size(); ++index) {
      auto& value = (*stack_)[index];
      if (value.isTensor()) {
        value = restored(value.toTensor());
      } else if (value.isTensorList()) {
        std::vector<Tensor> list;
        for (const Tensor& tensor : value.toTensorVector()) list.push_back(restored(tensor));
        value = IValue(std::move(list));
      }
    }
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack* stack_;
  size_t first_ = 0;
  c10::Device device_{TYPE, 0};
  HostViews views_;
  std::vector<std::pair<Tensor, Tensor>> pairs_;
};

void fallback(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

// --- making tensors -------------------------------------------------------------------------------------------------------------

c10::Device chosen(std::optional<c10::Device> device) {
  ensure_initialized();
  const auto index = device && device->has_index() ? device->index() : current_device();
  check_device(index);
  return {TYPE, index};
}

void refuse_pinned(std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "only host memory can be pinned; this tensor is made on the stand-in device");
}

Tensor empty(
    c10::IntArrayRef sizes, std::optional<c10::ScalarType> type, std::optional<c10::Layout>, std::optional<c10::Device> device,
    std::optional<bool> pin_memory, std::optional<c10::MemoryFormat> format) {
  refuse_pinned(pin_memory);
  const c10::DeviceGuard guard(chosen(device));
  return at::detail::empty_generic(
      sizes, c10::GetAllocator(TYPE), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(type), format);
}

Tensor empty_strided(
    c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::ScalarType> type, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  refuse_pinned(pin_memory);
  return empty_on(chosen(device), sizes, strides, c10::dtype_or_default(type));
}

/// Zeros that torch would not store; the device stores them.
Tensor efficient_zeros(
    c10::IntArrayRef sizes, std::optional<c10::ScalarType> type, std::optional<c10::Layout> layout, std::optional<c10::Device> device,
    std::optional<bool> pin_memory) {
  Tensor made = empty(sizes, type, layout, device, pin_memory, std::nullopt);
  current_stream(made.device().index()).drain();
  if (made.nbytes() > 0) std::memset(kernel_address(made.data_ptr()), 0, made.nbytes());
  return made;
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef sizes, std::optional<c10::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  const auto numel = c10::multiply_integers(sizes);
  const size_t needed = (impl->storage_offset() + numel) * impl->itemsize();
  if (numel > 0 && needed > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  impl->set_sizes_contiguous(sizes);
  if (format) impl->empty_tensor_restride(*format);
  return self;
}

Tensor as_strided(const Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

Tensor view(const Tensor& self, c10::IntArrayRef sizes) { return at::native::view(self, sizes); }

Tensor& set_source_storage(Tensor& self, at::Storage source) { return at::native::set_(self, std::move(source)); }
Tensor& set_source_storage_offset(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, sizes, strides);
}
Tensor& set_empty(Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  auto* allocator = c10::GetAllocator(TYPE);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(c10::Storage(c10::Storage::use_byte_size_t(), 0, allocator->allocate(0), allocator, /*resizable=*/true));
  impl->set_sizes_contiguous(c10::IntArrayRef{0});
  return self;
}
Tensor& set_source_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }

// --- copies ---------------------------------------------------------------------------------------------------------------------

void host_copy(const Tensor& to, const Tensor& from) {
  const at::NoGradGuard no_grad;
  to.copy_(from);
}

void count_copy(bool to_device, int64_t bytes) {
  ++(to_device ? counters().copies_to_device : counters().copies_to_host);
  (to_device ? counters().bytes_to_device : counters().bytes_to_host) += bytes;
}

/// Copy on the thread of a stream. Host memory is kept until then; memory of the device belongs to its stream, as on a GPU: a tensor that
/// is freed while another stream still copies may be overwritten, unless `record_stream` was called.
void copy_late(Stream& stream, bool to_device, Tensor to, Tensor from, Tensor keep) {
  stream.enqueue([&stream, to_device, to = std::move(to), from = std::move(from), keep = std::move(keep)] {
    const double begin = now();
    pause(copy_delay());
    host_copy(to, from);
    if (logging())
      add_log({to_device ? "to_device" : "to_host", "copy", stream.device(), stream.id(), static_cast<int64_t>(to.nbytes()), begin, now()});
  });
}

void copy_between_host_and_device(const Tensor& from, const Tensor& to, bool non_blocking) {
  const bool to_device = on_device(to);
  const Tensor& there = to_device ? to : from;
  auto& stream = current_stream(there.device().index());
  count_copy(to_device, static_cast<int64_t>(to.nbytes()));
  HostViews views;
  if (non_blocking && to_device) {
    // Pageable memory may be changed as soon as the call returns, as on a GPU; pinned memory may not.
    const Tensor source = is_pinned(from.const_data_ptr()) ? from : from.clone();
    copy_late(stream, true, views.view(to), source, source);
    return;
  }
  if (non_blocking) {
    copy_late(stream, false, to, views.view(from), to);
    return;
  }
  ++counters().synchronizations;
  stream.drain();
  const double begin = now();
  host_copy(to_device ? views.view(to) : to, to_device ? from : views.view(from));
  if (logging())
    add_log({to_device ? "to_device" : "to_host", "copy", stream.device(), stream.id(), static_cast<int64_t>(to.nbytes()), begin, now()});
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  ensure_initialized();
  if (to.numel() == 0) return to;
  const Tensor from = self.expand(to.sizes());
  if (on_device(from) != on_device(to)) {
    copy_between_host_and_device(from, to, non_blocking);
    return to;
  }
  auto& stream = current_stream(to.device().index());
  stream.drain();
  if (from.device() != to.device()) current_stream(from.device().index()).drain();
  ++counters().kernels;
  const double begin = now();
  pause(kernel_delay());
  HostViews views;
  host_copy(views.view(to), views.view(from));
  if (logging()) add_log({"kernel", "aten::copy_", to.device().index(), stream.id(), static_cast<int64_t>(to.nbytes()), begin, now()});
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  auto& stream = current_stream(self.device().index());
  ++counters().synchronizations;
  count_copy(false, static_cast<int64_t>(self.nbytes()));
  stream.drain();
  HostViews views;
  return views.view(self).item();
}

void record_stream_op(Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data(), stream.device_index(), stream.id());
}

/// Whether `parameter.data = other` is allowed: torch knows it of its own devices alone, where tensors of the host and of the device may
/// take each other's place. Without it `module.to(device)` would make new parameters, unlike on a GPU.
bool has_compatible_shallow_copy_type(const Tensor& self, const Tensor& from) {
  return self.layout() == c10::kStrided && from.layout() == c10::kStrided;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_efficientzerotensor", efficient_zeros);
  m.impl("set_", set_empty);
  m.impl("set_.source_Storage", set_source_storage);
  m.impl("set_.source_Storage_storage_offset", set_source_storage_offset);
  m.impl("set_.source_Tensor", set_source_tensor);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream_op);
  for (const char* name : {"convolution_overrideable", "convolution_backward_overrideable"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Copies keep the marks for conjugate and negative values: resolving them is itself a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace

/// Send every operator that the CPU has a kernel for to that kernel, also those that torch would compose of others on a device that it does
/// not know: so results are those of the CPU, bit for bit.
void register_operators_of_cpu() {
  // Which attention to use depends on the device: the CPU's answer names operators that only it has.
  static const auto* left_out = new std::vector<std::string>{"aten::_fused_sdp_choice"};
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    const bool ours = op && name.name.rfind("aten::", 0) == 0 && op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1) &&
        std::find(left_out->begin(), left_out->end(), name.name) == left_out->end();
    if (!ours) continue;
    const auto text = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(text.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

/// A tensor of the host over the memory of a device tensor, for the collectives.
Tensor host_view(const Tensor& tensor) {
  HostViews views;
  return views.view(tensor);
}

}  // namespace standin
