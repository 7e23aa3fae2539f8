#include "communicator_backend.h"

#include <tessera/collectives/calls/combined_work.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Storage.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include <utility>

#include "call_work.h"
#include "lists.h"
#include "reduction.h"
#include "sparse.h"
#include "without_gil.h"

namespace tessera::python {

namespace {

using c10d::OpType;
using std::chrono::milliseconds;

const at::Tensor& only(const Tensors& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "one tensor is needed, not ", tensors.size());
  return tensors[0];
}

const Tensors& only(const std::vector<Tensors>& lists) {
  TORCH_CHECK_VALUE(lists.size() == 1, "one list of tensors is needed, not ", lists.size());
  return lists[0];
}

void check_pairs(const Tensors& outputs, const Tensors& inputs) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), outputs.size(), " outputs for ", inputs.size(), " inputs");
}

// c10d counts rows, the communicator elements.
std::vector<int64_t> elements_of(const std::vector<int64_t>& rows, const at::Tensor& tensor, int ranks) {
  TORCH_CHECK_VALUE(tensor.dim() > 0, "a tensor of 0 dims has no rows to split");
  c10d::checkSplitSizes(rows, tensor, ranks);
  const auto row = tensor.size(0) > 0 ? tensor.numel() / tensor.size(0) : 0;
  std::vector<int64_t> elements;
  for (const auto count : rows) elements.push_back(count * row);
  return elements;
}

/// `numel` elements for `rank`, none for the others.
std::vector<int64_t> all_for(int rank, int64_t numel, int ranks) {
  std::vector<int64_t> splits(static_cast<size_t>(ranks));
  splits.at(static_cast<size_t>(rank)) = numel;
  return splits;
}

at::Tensor nothing_like(const at::Tensor& tensor) { return at::empty({0}, tensor.options()); }

/// The list of this rank, where it has one.
at::TensorList sent_by(const std::vector<Tensors>& lists) { return lists.empty() ? at::TensorList() : at::TensorList(lists[0]); }

void check_root(int64_t root, int ranks) {
  TORCH_CHECK_VALUE(root >= 0 && root < ranks, "root ", root, " is not in [0, ", ranks, ")");
}

std::string label_of(const char* kind, int tag) { return c10::str(kind, " ", tag); }

} // namespace

CommunicatorBackend::CommunicatorBackend(CommunicatorPtr communicator, const c10::intrusive_ptr<Options>& options)
    : Backend(communicator->rank(), communicator->size()),
      name_(c10::str("of group ", communicator->name(), " [", c10::Join(", ", communicator->ranks()), "] on rank ",
                     communicator->ranks()[static_cast<size_t>(communicator->rank())])),
      options_(options),
      communicator_(std::move(communicator)) {
  init();
}

CommunicatorBackend::~CommunicatorBackend() {
  const WithoutGil no_gil;
  shutdown();
  completions_.clear(); // waits for its threads
}

void CommunicatorBackend::shutdown() {
  const WithoutGil no_gil;
  CommunicatorPtr last;
  const std::lock_guard lock(mutex_);
  std::swap(last, communicator_);
}

CommunicatorPtr CommunicatorBackend::communicator() const {
  const std::lock_guard lock(mutex_);
  return communicator_;
}

std::string CommunicatorBackend::text_of(OpType type) const { return c10::str(c10d::opTypeToString(type), " ", name_); }

std::shared_ptr<CompletionThreads> CommunicatorBackend::completion_threads(OpType type, int peer) {
  const std::lock_guard lock(mutex_);
  auto& threads = completions_[peer == kAll ? std::pair(OpType::UNKNOWN, kAll) : std::pair(type, peer)];
  if (!threads) threads = std::make_shared<CompletionThreads>();
  return threads;
}

CommunicatorBackend::WorkPtr CommunicatorBackend::run(Request request, const Start& start) {
  const WithoutGil no_gil;
  const auto group = communicator();
  TORCH_CHECK(group, text_of(request.type), ": the group was shut down");
  const at::NoGradGuard no_grad;
  const auto event = internal::CollectiveEvent::begin(request.name, request.shown);
  Staging staging;
  auto call = [&] {
    const internal::CollectiveEvent::Parts parts;
    try {
      auto work = start(*group, staging);
      return std::make_shared<Call>(std::move(work), std::move(request.outputs), std::move(staging).finish(), event);
    } catch (const c10::ValueError& error) { // what is checked here says nothing of the call
      TORCH_CHECK_VALUE(false, text_of(request.type), ": ", error.what_without_backtrace());
    }
  }();
  CallWork::Description description{
      .type = request.type, .text = text_of(request.type), .rank = rank_, .sequence = ++calls_, .timeout = timeout_};
  if (request.timeout > kNoTimeout && request.timeout < options_->timeout) description.timeout = request.timeout;
  auto threads = completion_threads(request.type, request.peer);
  return c10::make_intrusive<CallWork>(std::move(call), std::move(threads), std::move(description));
}

CommunicatorBackend::WorkPtr CommunicatorBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return run({OpType::BROADCAST, "broadcast", tensors, tensors, options.timeout}, [&](Communicator& group, Staging& staging) {
    return group.broadcast(staging.in_out(only(tensors)), static_cast<int>(options.rootRank), "BROADCAST");
  });
}

CommunicatorBackend::WorkPtr CommunicatorBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (!tensors.empty() && tensors[0].is_sparse()) return allreduce_sparse(tensors, options);
  return run({OpType::ALLREDUCE, "all_reduce", tensors, tensors, options.timeout}, [&](Communicator& group, Staging& staging) {
    return Reduction(options.reduceOp).all_reduce(group, staging, only(tensors), "ALLREDUCE");
  });
}

CommunicatorBackend::WorkPtr CommunicatorBackend::allreduce_coalesced(Tensors& tensors,
                                                                      const c10d::AllreduceCoalescedOptions& options) {
  return run({OpType::ALLREDUCE_COALESCED, "all_reduce", tensors, tensors, options.timeout},
             [&](Communicator& group, Staging& staging) {
               const Reduction reduction(options.reduceOp);
               for (const auto& tensor : tensors) reduction.check_dtype(tensor); // before the first is sent
               std::vector<Work> works;
               for (const auto& tensor : tensors)
                 works.push_back(reduction.all_reduce(group, staging, tensor, "ALLREDUCE_COALESCED"));
               return internal::combine(std::move(works));
             });
}

CommunicatorBackend::WorkPtr CommunicatorBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return run({OpType::_ALLREDUCE_SPARSE, "sparse_all_reduce", tensors, tensors, options.timeout},
             [&](Communicator& group, Staging&) {
               TORCH_CHECK_VALUE(options.reduceOp.op_ == c10d::ReduceOp::SUM, "sparse tensors are summed alone");
               add_up_sparse(group, only(tensors));
               return Work();
             });
}

CommunicatorBackend::WorkPtr CommunicatorBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return run({OpType::REDUCE, "reduce", tensors, tensors, options.timeout}, [&](Communicator& group, Staging& staging) {
    check_root(options.rootRank, size_);
    const auto& tensor = only(tensors);
    const bool is_root = rank_ == options.rootRank;
    return Reduction(options.reduceOp).all_reduce(group, staging, is_root ? tensor : tensor.clone(), "REDUCE");
  });
}

CommunicatorBackend::WorkPtr CommunicatorBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                            const c10d::AllgatherOptions& options) {
  return run({OpType::ALLGATHER, "all_gather", inputs, only(outputs), options.timeout},
             [&](Communicator& group, Staging& staging) {
               const auto& input = only(inputs);
               return all_gather_list(group, staging, parts_of(outputs, group, input), input, "ALLGATHER");
             });
}

CommunicatorBackend::WorkPtr CommunicatorBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                                  const c10d::AllgatherOptions& options) {
  return run({OpType::_ALLGATHER_BASE, "all_gather", input, {output}, options.timeout},
             [&](Communicator& group, Staging& staging) {
               return group.all_gather_into(staging.output(output), Staging::input(input), "ALLGATHER_BASE");
             });
}

CommunicatorBackend::WorkPtr CommunicatorBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                                      const c10d::AllgatherOptions& options) {
  Tensors all;
  for (const auto& list : outputs) all.insert(all.end(), list.begin(), list.end());
  return run(
      {OpType::ALLGATHER_COALESCED, "all_gather", inputs, all, options.timeout}, [&](Communicator& group, Staging& staging) {
        std::vector<Work> works;
        for (size_t i = 0; i < inputs.size(); ++i) {
          Tensors of_ranks;
          for (const auto& list : outputs) {
            check_pairs(list, inputs);
            of_ranks.push_back(list[i]);
          }
          const std::vector<Tensors> lists{std::move(of_ranks)};
          works.push_back(all_gather_list(group, staging, parts_of(lists, group, inputs[i]), inputs[i], "ALLGATHER_COALESCED"));
        }
        return internal::combine(std::move(works));
      });
}

CommunicatorBackend::WorkPtr CommunicatorBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                                  const c10d::AllgatherOptions& options) {
  return run({OpType::COALESCED, "all_gather", inputs, outputs, options.timeout}, [&](Communicator& group, Staging& staging) {
    check_pairs(outputs, inputs);
    std::vector<Work> works;
    for (size_t i = 0; i < inputs.size(); ++i)
      works.push_back(group.all_gather_into(staging.output(outputs[i]), Staging::input(inputs[i]), "ALLGATHER_COALESCED"));
    return internal::combine(std::move(works));
  });
}

CommunicatorBackend::WorkPtr CommunicatorBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                         const c10d::GatherOptions& options) {
  const int root = static_cast<int>(options.rootRank);
  const bool is_root = rank_ == root;
  return run({OpType::GATHER, "gather", inputs, is_root ? only(outputs) : Tensors(), options.timeout},
             [&](Communicator& group, Staging& staging) {
               check_root(root, size_);
               const auto& input = only(inputs);
               TORCH_CHECK_VALUE(is_root || outputs.empty(), "only the root receives");
               const auto output = is_root ? staging.output(parts_of(outputs, group, input)) : nothing_like(input);
               const auto received = is_root ? sizes_of(only(outputs)) : all_for(root, 0, size_);
               const auto sent = all_for(root, input.numel(), size_);
               return group.all_to_all(output, Staging::input_apart(input, output), received, sent, "GATHER");
             });
}

CommunicatorBackend::WorkPtr CommunicatorBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                          const c10d::ScatterOptions& options) {
  const int root = static_cast<int>(options.rootRank);
  const bool is_root = rank_ == root;
  return run({OpType::SCATTER, "scatter", sent_by(inputs), outputs, options.timeout}, [&](Communicator& group, Staging& staging) {
    check_root(root, size_);
    const auto& output = only(outputs);
    TORCH_CHECK_VALUE(is_root || inputs.empty(), "only the root sends");
    const auto input = is_root ? Staging::input(parts_of(inputs, group, output)) : nothing_like(output);
    const auto sent = is_root ? sizes_of(only(inputs)) : all_for(root, 0, size_);
    const auto received = all_for(root, output.numel(), size_);
    return group.all_to_all(staging.output_apart(output, input), input, received, sent, "SCATTER");
  });
}

CommunicatorBackend::WorkPtr CommunicatorBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                                 const c10d::ReduceScatterOptions& options) {
  return run({OpType::REDUCE_SCATTER, "reduce_scatter", sent_by(inputs), outputs, options.timeout}, [&](Communicator& group,
                                                                                                        Staging& staging) {
    const auto& output = only(outputs);
    return reduce_scatter_list(group, staging, options.reduceOp, output, parts_of(inputs, group, output), "REDUCE_SCATTER");
  });
}

CommunicatorBackend::WorkPtr CommunicatorBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                       const c10d::ReduceScatterOptions& options) {
  return run({OpType::_REDUCE_SCATTER_BASE, "reduce_scatter", input, {output}, options.timeout},
             [&](Communicator& group, Staging& staging) {
               return Reduction(options.reduceOp).reduce_scatter(group, staging, output, input, "REDUCE_SCATTER_BASE");
             });
}

CommunicatorBackend::WorkPtr CommunicatorBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                                  const c10d::ReduceScatterOptions& options) {
  return run({OpType::COALESCED, "reduce_scatter", inputs, outputs, options.timeout}, [&](Communicator& group, Staging& staging) {
    check_pairs(outputs, inputs);
    const Reduction reduction(options.reduceOp);
    for (const auto& input : inputs) reduction.check_dtype(input);
    std::vector<Work> works;
    for (size_t i = 0; i < inputs.size(); ++i)
      works.push_back(reduction.reduce_scatter(group, staging, outputs[i], inputs[i], "REDUCE_SCATTER_COALESCED"));
    return internal::combine(std::move(works));
  });
}

CommunicatorBackend::WorkPtr CommunicatorBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                                std::vector<int64_t>& output_splits,
                                                                std::vector<int64_t>& input_splits,
                                                                const c10d::AllToAllOptions& options) {
  return run({OpType::ALLTOALL_BASE, "all_to_all", input, {output}, options.timeout}, [&](Communicator& group, Staging& staging) {
    const auto received = elements_of(output_splits, output, size_), sent = elements_of(input_splits, input, size_);
    return group.all_to_all(staging.output(output), Staging::input(input), received, sent, "ALLTOALL_BASE");
  });
}

CommunicatorBackend::WorkPtr CommunicatorBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                                           const c10d::AllToAllOptions& options) {
  return run({OpType::ALLTOALL, "all_to_all", inputs, outputs, options.timeout}, [&](Communicator& group, Staging& staging) {
    return group.all_to_all(staging.output(outputs), Staging::input(inputs), sizes_of(outputs), sizes_of(inputs), "ALLTOALL");
  });
}

CommunicatorBackend::WorkPtr CommunicatorBackend::send(Tensors& tensors, int to, int tag) {
  const auto start = [&](Communicator& group, Staging&) {
    return group.send(Staging::input(only(tensors)), to, label_of("tag", tag));
  };
  return run({OpType::SEND, "send", tensors, tensors, c10d::kUnsetTimeout, to}, start);
}

CommunicatorBackend::WorkPtr CommunicatorBackend::recv(Tensors& tensors, int from, int tag) {
  const auto start = [&](Communicator& group, Staging& staging) {
    return group.receive(staging.output(only(tensors)), from, label_of("tag", tag));
  };
  return run({OpType::RECV, "recv", tensors, tensors, c10d::kUnsetTimeout, from}, start);
}

CommunicatorBackend::WorkPtr CommunicatorBackend::recvAnysource(Tensors&, int) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, text_of(OpType::RECVANYSOURCE), ": a receive needs the rank that sends (src=)");
}

CommunicatorBackend::WorkPtr CommunicatorBackend::barrier(const c10d::BarrierOptions& options) {
  return run({OpType::BARRIER, "barrier", {}, {}, options.timeout}, [](Communicator& group, Staging&) {
    return group.all_reduce(at::zeros({1}, at::kByte), tessera::ReduceOp::kMax, "BARRIER"); // the communicator's own one blocks
  });
}

void CommunicatorBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool) { barrier(options)->wait(kNoTimeout); }

void CommunicatorBackend::setTimeout(milliseconds timeout) {
  TORCH_CHECK_VALUE(timeout > kNoTimeout && timeout <= options_->timeout, "group ", options_->group_name,
                    ": a timeout is above 0 and at most what the group was made with, ", options_->timeout.count(), " ms, not ",
                    timeout.count(), " ms");
  timeout_ = timeout;
}

at::Tensor CommunicatorBackend::allocateTensor(long numel, at::TensorOptions options) {
  const auto group = communicator();
  TORCH_CHECK(group, "allocate ", name_, ": the group was shut down");
  const auto bytes = static_cast<int64_t>(options.dtype().itemsize()) * numel;
  c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(bytes), memory_.allocate(bytes, group.get()));
  return at::empty({0}, options.device(at::kCPU)).set_(std::move(storage), 0, {numel});
}

} // namespace tessera::python
