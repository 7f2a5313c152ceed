// What Python sees of the device.
#include <torch/csrc/Generator.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "collectives.h"
#include "device.h"
#include "generator.h"

namespace py = pybind11;
using namespace standin;

namespace standin {
void register_operators_of_cpu();
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  register_operators_of_cpu();

  m.def("configure", &configure);
  m.def("device_count", &device_count);
  m.def("is_initialized", &initialized);
  m.def("is_in_bad_fork", &in_bad_fork);
  m.def("init", &ensure_initialized);
  m.def("current_device", [] { return int(current_device()); });
  m.def("check_device", &check_device);
  m.def("exchange_device", [](int index) {
    check_device(index);
    return int(exchange_device(static_cast<DeviceIndex>(index)));
  });
  m.def("synchronize", [](int index) {
    check_device(index);
    synchronize_device(static_cast<DeviceIndex>(index));
  });
  m.def("default_generator", [](int index) {
    check_device(index);
    return py::reinterpret_steal<py::object>(THPGenerator_initDefaultGenerator(default_generator(static_cast<DeviceIndex>(index))));
  });

  m.def("memory_stats", [](int index) {
    const auto stats = memory_stats(static_cast<DeviceIndex>(index));
    py::dict found;
    found["capacity"] = stats.capacity;
    found["allocated"] = stats.allocated;
    found["peak_allocated"] = stats.peak_allocated;
    found["reserved"] = stats.reserved;
    found["peak_reserved"] = stats.peak_reserved;
    found["allocations"] = stats.allocations;
    found["frees"] = stats.frees;
    found["retries"] = stats.retries;
    found["failures"] = stats.failures;
    return found;
  });
  m.def("reset_peak_memory", [](int index) { reset_peak_memory(static_cast<DeviceIndex>(index)); });
  m.def("set_capacity", [](int index, size_t bytes) { set_capacity(static_cast<DeviceIndex>(index), bytes); });
  m.def("empty_cache", &empty_cache, py::call_guard<py::gil_scoped_release>());

  m.def("counters", [] {
    auto& all = counters();
    py::dict found;
    found["copies_to_device"] = all.copies_to_device.load();
    found["copies_to_host"] = all.copies_to_host.load();
    found["bytes_to_device"] = all.bytes_to_device.load();
    found["bytes_to_host"] = all.bytes_to_host.load();
    found["synchronizations"] = all.synchronizations.load();
    found["kernels"] = all.kernels.load();
    found["collectives"] = all.collectives.load();
    return found;
  });
  m.def("reset_counters", [] {
    auto& all = counters();
    for (auto* counter : {&all.copies_to_device, &all.copies_to_host, &all.bytes_to_device, &all.bytes_to_host, &all.synchronizations,
                          &all.kernels, &all.collectives})
      *counter = 0;
  });
  m.def("set_logging", &set_logging);
  m.def("take_log", [] {
    py::list found;
    for (const auto& entry : take_log())
      found.append(py::make_tuple(entry.kind, entry.name, entry.device, entry.stream, entry.bytes, entry.begin, entry.end));
    return found;
  });
  m.def("now", &now);
  m.def("set_delay", &set_delay);
  m.def("delays", [] { return py::make_tuple(copy_delay(), kernel_delay()); });

  py::class_<Backend, c10d::Backend, c10::intrusive_ptr<Backend>>(m, "Backend")
      .def(py::init([](const c10::intrusive_ptr<c10d::Backend>& gloo) { return c10::make_intrusive<Backend>(gloo); }));
}
