// The collective backend of the stand-in device: gloo on the device's memory, ordered on streams of its own.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <map>

#include "device.h"

namespace standin {

/// Runs each collective late, on a stream for communication, after the work that precedes it on the caller's stream. `wait` on its handle
/// makes the caller's stream wait, not the host: as with the backends of GPUs.
class Backend final : public c10d::Backend {
 public:
  explicit Backend(c10::intrusive_ptr<c10d::Backend> gloo) : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  const std::string getBackendName() const override { return "standin"; }
  ~Backend() override { *dropped_ = true; }
  void setSequenceNumberForGroup() override {}
  /// How many collectives were called, also those that have not begun.
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void abort() override {
    *dropped_ = true;
    gloo_->abort();
  }
  void shutdown() override {
    *dropped_ = true;
    gloo_->shutdown();
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int rank, int tag) override;
  WorkPtr recv(Tensors& tensors, int rank, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

 private:
  using Start = std::function<WorkPtr()>;
  /// `used` are the tensors on the device, `results` those that the handle's future holds.
  WorkPtr run(const char* name, c10d::OpType type, Tensors used, Tensors results, int channel, Start start);
  int64_t stream_for(DeviceIndex device, int channel);

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::atomic<uint64_t> sequence_{0};
  std::shared_ptr<std::atomic<bool>> dropped_ = std::make_shared<std::atomic<bool>>(false);
  std::mutex mutex_;
  std::map<std::pair<DeviceIndex, int>, int64_t> streams_;
};

}  // namespace standin
