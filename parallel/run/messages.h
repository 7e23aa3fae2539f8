#pragma once

// Internal: what the ranks of a pipeline send each other.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <tessera/collectives/communicator.h>
#include <tessera/parallel/run/tensor_header.h>

namespace tessera::internal::pipeline {

/// A message by what its sender and receiver both know of it.
struct MessageName {
  int64_t peer;      ///< of the pipeline
  std::string text;  ///< "outputs of stage 1, micro-batch 2 of 4"
  std::string shape; ///< of the micro-batch, the stage and the kind of step: messages with the same one look alike
};

/// A message that was asked for.
struct Incoming {
  MessageHeader header;
  std::vector<at::Tensor> payloads; ///< undefined ones too
  at::Tensor numbers;
  std::vector<tessera::Work> works;
};

/// The messages in one direction, forward or backward. What goes from a rank to another comes in the order of its sending. The
/// first message of a shape comes with a header; later ones are without, unless `always_headers`.
class Messages {
 public:
  Messages(CommunicatorPtr communicator, DeviceMesh mesh, bool always_headers)
      : communicator_(std::move(communicator)), mesh_(std::move(mesh)), always_headers_(always_headers) {}

  /// Returns at once. What is sent lives until it has arrived.
  void send(const FlatValue& value, const MessageName& name);
  /// Whether the header of such a message is here, so that `ask` would not wait.
  bool knows(const MessageName& name) const { return !always_headers_ && received_.contains({name.peer, name.shape}); }
  Incoming ask(const MessageName& name);
  /// Waits for it. Its tensors are leaves, which require gradients as the sender's do.
  FlatValue take(Incoming incoming) const;

  /// Drops what has arrived.
  void drop_sent();
  void wait_for_sent();
  /// Adds over the pipeline. It ends with an error where a rank has left.
  void sum(const at::Tensor& numbers, const char* what) { communicator_->all_reduce(numbers, ReduceOp::kSum, what).wait(); }
  /// Ends the waiting of others for this rank.
  void close() { communicator_->close(); }

 private:
  using Key = std::pair<int64_t, std::string>;
  void send_header(const MessageHeader& header, const MessageName& name);
  MessageHeader receive_header(const MessageName& name);
  void send_tensor(at::Tensor tensor, const MessageName& name, const char* what, size_t index);

  CommunicatorPtr communicator_;
  DeviceMesh mesh_;
  bool always_headers_;
  std::map<Key, MessageHeader> sent_, received_;
  std::deque<std::pair<tessera::Work, at::Tensor>> in_flight_;
};

} // namespace tessera::internal::pipeline
