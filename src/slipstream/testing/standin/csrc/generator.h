// Random numbers of the device: the engine of the CPU with a state of its own, so that one seed gives the same numbers on both.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

#include "device.h"

namespace standin {

struct GeneratorImpl final : c10::GeneratorImpl {
  explicit GeneratorImpl(DeviceIndex device);
  void set_current_seed(uint64_t seed) override { engine().set_current_seed(seed); }
  void set_offset(uint64_t offset) override { engine().set_offset(offset); }
  uint64_t get_offset() const override { return engine().get_offset(); }
  uint64_t current_seed() const override { return engine().current_seed(); }
  uint64_t seed() override { return engine().seed(); }
  void set_state(const c10::TensorImpl& state) override { engine().set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return engine().get_state(); }
  static c10::DeviceType device_type() { return TYPE; }

  /// The generator that the kernels of the CPU take.
  const at::Generator& inner() const { return inner_; }
  at::CPUGeneratorImpl& engine() const { return *inner_.get<at::CPUGeneratorImpl>(); }

 private:
  GeneratorImpl* clone_impl() const override;
  at::Generator inner_;
};

const at::Generator& default_generator(DeviceIndex device);

}  // namespace standin
