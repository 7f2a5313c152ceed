#include "collectives.h"

#include <ATen/core/ivalue.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <limits>
#include <thread>

namespace standin {

at::Tensor host_view(const at::Tensor& tensor);

namespace {

using Tensors = Backend::Tensors;

/// Channels keep the order of what must stay in order: collectives in one, messages to and from each rank in their own.
constexpr int COLLECTIVES = 0;
int send_channel(int rank) { return 1 + 2 * rank; }
int receive_channel(int rank) { return 2 + 2 * rank; }
constexpr int ANY_SOURCE = std::numeric_limits<int>::max();

class Work final : public c10d::Work {
 public:
  Work(int rank, c10d::OpType type, EventPtr end, DeviceIndex device, Tensors used, Tensors results)
      : c10d::Work(rank, type), end_(std::move(end)), device_(device), used_(std::move(used)), results_(std::move(results)) {}

  bool isCompleted() override { return end_->done(); }
  bool isSuccess() const override { return !outcome_->error; }
  std::exception_ptr exception() const override { return outcome_->error; }
  std::vector<at::Tensor> result() override { return results_; }
  void synchronize() override { current_stream(device_).wait_event(end_); }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    // A barrier and a message have no result whose use would wait: what failed is told here.
    if (results_.empty()) end_->wait(end_->version());
    if (end_->done() && outcome_->error) std::rethrow_exception(outcome_->error);
    used_.clear();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  int sourceRank() const override { return outcome_->source; }

  struct Outcome {
    std::exception_ptr error;
    int source = -1;
  };
  std::shared_ptr<Outcome> outcome_ = std::make_shared<Outcome>();
  c10::intrusive_ptr<c10::ivalue::Future> future_;

 private:
  EventPtr end_;
  DeviceIndex device_;
  Tensors used_;
  Tensors results_;
};

Tensors views(const Tensors& tensors) {
  const c10::InferenceMode outside(false);  // the thread that writes to them is not in the caller's mode
  Tensors made;
  for (const auto& tensor : tensors) made.push_back(tensor.device().type() == TYPE ? host_view(tensor) : tensor);
  return made;
}

std::vector<Tensors> views(const std::vector<Tensors>& lists) {
  std::vector<Tensors> made;
  for (const auto& list : lists) made.push_back(views(list));
  return made;
}

Tensors joined(const Tensors& tensors, const std::vector<Tensors>& lists) {
  Tensors all = tensors;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

Tensors joined(const Tensors& tensors, const Tensors& more) { return joined(tensors, std::vector<Tensors>{more}); }

Tensors flat(const std::vector<Tensors>& lists) { return joined(Tensors{}, lists); }

}  // namespace

int64_t Backend::stream_for(DeviceIndex device, int channel) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto [found, added] = streams_.try_emplace({device, channel}, 0);
  if (added) found->second = new_stream(device);
  return found->second;
}

Backend::WorkPtr Backend::run(const char* name, c10d::OpType type, Tensors used, Tensors results, int channel, Start start) {
  ensure_initialized();
  TORCH_CHECK_WITH(DistBackendError, !*dropped_, name, " was called in a process group that has been aborted or shut down");
  auto device = current_device();
  for (const auto& tensor : used) {
    TORCH_CHECK(
        tensor.device().type() == TYPE, name, " got a tensor on ", tensor.device(),
        " beside tensors of the stand-in device; tensors of the host go through the backend for cpu");
    device = tensor.device().index();
  }
  auto& caller = current_stream(device);
  auto& stream = stream_of(device, stream_for(device, channel));
  auto ready = std::make_shared<Event>(false);
  auto end = std::make_shared<Event>(false);
  caller.record(ready);
  stream.wait_event(ready);
  ++counters().collectives;
  if (channel == COLLECTIVES) ++sequence_;
  auto work = c10::make_intrusive<Work>(getRank(), type, end, device, used, results);
  stream.enqueue([name, &stream, used = std::move(used), outcome = work->outcome_, dropped = dropped_, start = std::move(start)] {
    const double begin = now();
    std::this_thread::sleep_for(std::chrono::duration<double>(copy_delay()));
    try {
      auto inner = start();
      inner->wait();
      outcome->source = inner->retrieveOpType() == c10d::OpType::RECVANYSOURCE ? inner->sourceRank() : -1;
    } catch (...) {
      outcome->error = std::current_exception();
      throw Failure{outcome->error, dropped};
    }
    if (logging()) add_log({"collective", name, stream.device(), stream.id(), 0, begin, now()});
  });
  stream.record(end);
  work->future_ = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{c10::Device(TYPE, device)});
  const c10::StreamGuard guard(c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, device), stream.id()));
  work->future_->markCompleted(at::IValue(results));  // its users wait for what this stream has been given
  return work;
}

Backend::WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return run("broadcast", c10d::OpType::BROADCAST, tensors, tensors, COLLECTIVES, [gloo = gloo_, host = views(tensors), options]() mutable {
    return gloo->broadcast(host, options);
  });
}

Backend::WorkPtr Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return run("allreduce", c10d::OpType::ALLREDUCE, tensors, tensors, COLLECTIVES, [gloo = gloo_, host = views(tensors), options]() mutable {
    return gloo->allreduce(host, options);
  });
}

Backend::WorkPtr Backend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return run(
      "allreduce_coalesced", c10d::OpType::ALLREDUCE_COALESCED, tensors, tensors, COLLECTIVES,
      [gloo = gloo_, host = views(tensors), options]() mutable { return gloo->allreduce_coalesced(host, options); });
}

Backend::WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return run("reduce", c10d::OpType::REDUCE, tensors, tensors, COLLECTIVES, [gloo = gloo_, host = views(tensors), options]() mutable {
    return gloo->reduce(host, options);
  });
}

Backend::WorkPtr Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return run(
      "allgather", c10d::OpType::ALLGATHER, joined(inputs, outputs), flat(outputs), COLLECTIVES,
      [gloo = gloo_, to = views(outputs), from = views(inputs), options]() mutable { return gloo->allgather(to, from, options); });
}

Backend::WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  return run(
      "_allgather_base", c10d::OpType::_ALLGATHER_BASE, {output, input}, {output}, COLLECTIVES,
      [gloo = gloo_, host = views(Tensors{output, input}), options]() mutable { return gloo->_allgather_base(host[0], host[1], options); });
}

Backend::WorkPtr Backend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return run(
      "allgather_coalesced", c10d::OpType::ALLGATHER_COALESCED, joined(inputs, outputs), flat(outputs), COLLECTIVES,
      [gloo = gloo_, to = views(outputs), from = views(inputs), options]() mutable { return gloo->allgather_coalesced(to, from, options); });
}

Backend::WorkPtr Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return run(
      "allgather_into_tensor_coalesced", c10d::OpType::COALESCED, joined(inputs, outputs), outputs, COLLECTIVES,
      [gloo = gloo_, to = views(outputs), from = views(inputs), options]() mutable {
        return gloo->allgather_into_tensor_coalesced(to, from, options);
      });
}

Backend::WorkPtr Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  return run(
      "gather", c10d::OpType::GATHER, joined(inputs, outputs), flat(outputs), COLLECTIVES,
      [gloo = gloo_, to = views(outputs), from = views(inputs), options]() mutable { return gloo->gather(to, from, options); });
}

Backend::WorkPtr Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  return run(
      "scatter", c10d::OpType::SCATTER, joined(outputs, inputs), outputs, COLLECTIVES,
      [gloo = gloo_, to = views(outputs), from = views(inputs), options]() mutable { return gloo->scatter(to, from, options); });
}

Backend::WorkPtr Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) {
  return run(
      "reduce_scatter", c10d::OpType::REDUCE_SCATTER, joined(outputs, inputs), outputs, COLLECTIVES,
      [gloo = gloo_, to = views(outputs), from = views(inputs), options]() mutable { return gloo->reduce_scatter(to, from, options); });
}

Backend::WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  return run(
      "_reduce_scatter_base", c10d::OpType::_REDUCE_SCATTER_BASE, {output, input}, {output}, COLLECTIVES,
      [gloo = gloo_, host = views(Tensors{output, input}), options]() mutable {
        return gloo->_reduce_scatter_base(host[0], host[1], options);
      });
}

Backend::WorkPtr Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  return run(
      "reduce_scatter_tensor_coalesced", c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED, joined(inputs, outputs), outputs, COLLECTIVES,
      [gloo = gloo_, to = views(outputs), from = views(inputs), options]() mutable {
        return gloo->reduce_scatter_tensor_coalesced(to, from, options);
      });
}

Backend::WorkPtr Backend::alltoall_base(
    at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
    const c10d::AllToAllOptions& options) {
  return run(
      "alltoall_base", c10d::OpType::ALLTOALL_BASE, {output, input}, {output}, COLLECTIVES,
      [gloo = gloo_, host = views(Tensors{output, input}), output_sizes, input_sizes, options]() mutable {
        return gloo->alltoall_base(host[0], host[1], output_sizes, input_sizes, options);
      });
}

Backend::WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  return run(
      "alltoall", c10d::OpType::ALLTOALL, joined(outputs, inputs), outputs, COLLECTIVES,
      [gloo = gloo_, to = views(outputs), from = views(inputs), options]() mutable { return gloo->alltoall(to, from, options); });
}

Backend::WorkPtr Backend::send(Tensors& tensors, int rank, int tag) {
  return run("send", c10d::OpType::SEND, tensors, {}, send_channel(rank), [gloo = gloo_, host = views(tensors), rank, tag]() mutable {
    return gloo->send(host, rank, tag);
  });
}

Backend::WorkPtr Backend::recv(Tensors& tensors, int rank, int tag) {
  return run("recv", c10d::OpType::RECV, tensors, tensors, receive_channel(rank), [gloo = gloo_, host = views(tensors), rank, tag]() mutable {
    return gloo->recv(host, rank, tag);
  });
}

Backend::WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  return run(
      "recvAnysource", c10d::OpType::RECVANYSOURCE, tensors, tensors, ANY_SOURCE,
      [gloo = gloo_, host = views(tensors), tag]() mutable { return gloo->recvAnysource(host, tag); });
}

Backend::WorkPtr Backend::barrier(const c10d::BarrierOptions& options) {
  c10d::BarrierOptions host = options;
  host.device_ids = {};
  host.device = std::nullopt;
  return run("barrier", c10d::OpType::BARRIER, {}, {}, COLLECTIVES, [gloo = gloo_, host] { return gloo->barrier(host); });
}

}  // namespace standin

namespace c10d {
namespace {

/// Times the phases of DistributedDataParallel on the clock of the host: kernels run in the caller's thread.
class StandinTimer final : public Timer {
 public:
  explicit StandinTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto begun = getTimestamp(start);
    const auto ended = getTimestamp(end);
    return begun && ended ? std::make_optional(*ended - *begun) : std::nullopt;
  }
};

C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::DeviceType::PrivateUse1, StandinTimer)

}  // namespace
}  // namespace c10d
