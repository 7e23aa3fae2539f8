#include <tessera/tests/support/simulated_device/communicator.h>

#include <tessera/collectives/checks.h>
#include <tessera/tests/support/simulated_device/boxed.h>
#include <tessera/tests/support/simulated_device/caching_allocator.h>
#include <tessera/tests/support/simulated_device/runtime.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace tessera::testing::sim {

namespace {

CommunicatorFaults faults; // set by tests between steps, by the thread that launches

at::Tensor cpu_alias(const at::Tensor& tensor) { return Aliases(c10::kCPU).of(tensor); }

size_t make_stream(const internal::GroupDescription& group) {
  const auto stream = Runtime::get().make_stream();
  Runtime::get().name_stream(stream, c10::str("group ", group.name, " [", c10::Join(", ", group.ranks), "]"));
  return stream;
}

/// A collective in flight.
class SimulatedWork final : public WorkState {
 public:
  SimulatedWork(CollectiveKind kind, size_t stream, std::vector<at::Tensor> kept)
      : kind_(kind), done_(Runtime::get().record(stream)), kept_(std::move(kept)) {}

  /// Nobody waited: the memory stays until the collective is done.
  ~SimulatedWork() override {
    for (const auto& tensor : kept_) CachingAllocator::get().record_stream(tensor.storage().data(), done_.position.stream);
  }

  void wait() override {
    if (faults.skip_wait != kind_) Runtime::get().make_wait(current_stream(), done_);
    kept_.clear();
  }

  bool is_completed() override { return Runtime::get().query(done_); }
  bool blocks_host() const override { return false; }

 private:
  CollectiveKind kind_;
  Mark done_;
  std::vector<at::Tensor> kept_;
};

class SimulatedCommunicator final : public Communicator {
 public:
  explicit SimulatedCommunicator(const internal::GroupDescription& group)
      : Communicator(group.name, group.ranks, group.rank, kDeviceType),
        gloo_(internal::make_backend_communicator(group, at::kCPU)),
        stream_(make_stream(group)) {}

  ~SimulatedCommunicator() override {
    try {
      Runtime::get().synchronize(stream_, "communicator's end"); // its work uses `gloo_`
    } catch (const std::exception&) {                            // of a collective that nobody waited for
    }
  }

  Work all_gather_into(const at::Tensor& output, const at::Tensor& input, std::string_view label) override {
    internal::check_all_gather(*this, output, input, label);
    const Call call{CollectiveKind::kAllGather, label, output.nbytes()};
    return run(call, {input}, {output}, [this, to = cpu_alias(output), from = cpu_alias(input)](const std::string& name) {
      return gloo_->all_gather_into(to, from, name);
    });
  }

  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op, std::string_view label) override {
    internal::check_reduce_scatter(*this, output, input, op, label);
    const Call call{CollectiveKind::kReduceScatter, label, input.nbytes()};
    return run(call, {}, {input, output}, [this, op, to = cpu_alias(output), from = cpu_alias(input)](const std::string& name) {
      return gloo_->reduce_scatter(to, from, divided_before(from, op), name);
    });
  }

  bool averages(at::ScalarType dtype) const override { return dtype != at::kHalf; }
  bool scales(at::ScalarType dtype) const override { return dtype == at::kFloat || dtype == at::kDouble; }

  Work reduce_scatter_scaled(const at::Tensor& output, const at::Tensor& input, double factor, std::string_view label) override {
    internal::check_reduce_scatter(*this, output, input, ReduceOp::kSum, label);
    const Call call{CollectiveKind::kReduceScatter, label, input.nbytes()};
    return run(call, {}, {input, output},
               [this, factor, to = cpu_alias(output), from = cpu_alias(input)](const std::string& name) {
                 return gloo_->reduce_scatter(to, from.mul_(factor), ReduceOp::kSum, name);
               });
  }

  Work all_reduce(const at::Tensor& tensor, ReduceOp op, std::string_view label) override {
    internal::check_all_reduce(*this, tensor, op, label);
    const Call call{CollectiveKind::kAllReduce, label, tensor.nbytes()};
    return run(call, {}, {tensor}, [this, op, on_cpu = cpu_alias(tensor)](const std::string& name) {
      return gloo_->all_reduce(on_cpu, divided_before(on_cpu, op), name);
    });
  }

  Work all_to_all(const at::Tensor& output, const at::Tensor& input, const std::vector<int64_t>& output_splits,
                  const std::vector<int64_t>& input_splits, std::string_view label) override {
    const auto splits = internal::check_all_to_all(*this, output, input, output_splits, input_splits, label);
    const Call call{CollectiveKind::kAllToAll, label, std::max(output.nbytes(), input.nbytes())};
    return run(call, {input}, {output}, [this, splits, to = cpu_alias(output), from = cpu_alias(input)](const std::string& name) {
      return gloo_->all_to_all(to, from, splits.output, splits.input, name);
    });
  }

  Work broadcast(const at::Tensor& tensor, int root, std::string_view label) override {
    internal::check_broadcast(*this, tensor, root, label);
    const Call call{CollectiveKind::kBroadcast, label, tensor.nbytes()};
    const auto on_cpu = cpu_alias(tensor);
    const auto issue = [this, root, on_cpu](const std::string& name) { return gloo_->broadcast(on_cpu, root, name); };
    return rank() == root ? run(call, {tensor}, {}, issue) : run(call, {}, {tensor}, issue);
  }

  Work coalesced(const std::function<void()>& issue) override {
    TORCH_CHECK(!coalescing_, "coalesced calls on group ", name(), " do not nest");
    coalescing_ = true;
    try {
      issue();
    } catch (...) {
      coalescing_ = false;
      coalesced_.clear();
      throw;
    }
    coalescing_ = false;
    // In order after what was issued.
    return Work(
        std::make_shared<SimulatedWork>(CollectiveKind::kBarrier, own_or_current_stream(), std::exchange(coalesced_, {})));
  }

  void give_up(std::string_view cause) override {
    run({CollectiveKind::kAllGather, cause, 0}, {}, {}, [this](const std::string& name) {
      try {
        gloo_->give_up(name);
      } catch (const std::exception&) { // which the other ranks have
      }
      return Work();
    });
  }

  void run_on_current_stream() override { has_own_stream_ = false; }

  void barrier(std::string_view label) override {
    run({CollectiveKind::kBarrier, label, 0}, {}, {}, [this](const std::string& name) {
      gloo_->barrier(name);
      return Work();
    });
    Runtime::get().synchronize(stream_, "barrier");
  }

 private:
  struct Call {
    CollectiveKind kind;
    std::string_view label;
    size_t bytes; ///< of the full buffer
  };

  /// As NCCL averages halves: each is divided, and rounded, before it is added. Returns what is left to do.
  ReduceOp divided_before(const at::Tensor& on_cpu, ReduceOp op) const {
    if (op != ReduceOp::kAvg || averages(on_cpu.scalar_type())) return op;
    on_cpu.div_(size());
    return ReduceOp::kSum;
  }

  Work run(const Call& call, const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes,
           std::function<Work(const std::string& label)> issue) {
    auto& runtime = Runtime::get();
    const auto bytes = static_cast<int64_t>(call.bytes);
    counters_.add(call.kind, bytes);
    const auto stream = own_or_current_stream();
    if (faults.skip_start != call.kind) runtime.make_wait(stream, runtime.record(current_stream()));
    runtime.make_follow(stream, last_); // one at a time, in the order of the calls, whatever their streams: as NCCL does
    std::vector<Use> uses;
    for (const auto& tensor : reads) uses.push_back({Region::of(tensor), false});
    for (const auto& tensor : writes) uses.push_back({Region::of(tensor), true});
    runtime.launch(stream, {c10::str(to_string(call.kind), " '", call.label, "'"), std::move(uses),
                            [issue = std::move(issue), label = std::string(call.label)] { issue(label).wait(); },
                            runtime.time_line().collective_us(bytes)});
    last_ = runtime.record(stream);
    auto kept = reads;
    kept.insert(kept.end(), writes.begin(), writes.end());
    if (faults.releases_early) kept.clear();
    if (coalescing_) {
      coalesced_.insert(coalesced_.end(), kept.begin(), kept.end());
      return {};
    }
    return Work(std::make_shared<SimulatedWork>(call.kind, stream, std::move(kept)));
  }

  size_t own_or_current_stream() const { return has_own_stream_ || faults.keeps_own_stream ? stream_ : current_stream(); }

  CommunicatorPtr gloo_;
  size_t stream_;
  Mark last_; ///< the end of the last collective
  bool has_own_stream_ = true;
  bool coalescing_ = false;
  std::vector<at::Tensor> coalesced_; // what its calls keep
};

} // namespace

CommunicatorPtr make_communicator(const internal::GroupDescription& group) {
  return std::make_shared<SimulatedCommunicator>(group);
}

void set_communicator_faults(const CommunicatorFaults& made) { faults = made; }

} // namespace tessera::testing::sim
