#include <tessera/parallel/run/messages.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <cstring>

#include <tessera/collectives/process_context.h>

namespace tessera::internal::pipeline {

namespace {

/// What differs, for people.
std::string difference(const MessageHeader& now, const MessageHeader& before) {
  if (now.structure != before.structure || now.numbers != before.numbers) return "they have another structure";
  for (size_t i = 0; i < now.tensors.size(); ++i) {
    if (!(now.tensors[i] == before.tensors[i]))
      return c10::str("tensor ", i, " is ", now.tensors[i].describe(), ", and was ", before.tensors[i].describe());
  }
  return "";
}

at::Tensor to_tensor(const std::vector<int64_t>& numbers, c10::Device device) {
  auto tensor = at::empty({std::ssize(numbers)}, at::kLong);
  std::memcpy(tensor.mutable_data_ptr(), numbers.data(), numbers.size() * sizeof(int64_t));
  return tensor.to(device);
}

} // namespace

void Messages::send(const FlatValue& value, const MessageName& name) {
  const auto header = header_of(value, mesh_, name.text);
  const auto [known, is_new] = sent_.emplace(Key(name.peer, name.shape), header);
  TORCH_CHECK(is_new || always_headers_ || known->second == header, "rank ", process_context().rank(), ": the ", name.text,
              " look otherwise than for an earlier micro-batch of the same shape: ", difference(header, known->second),
              ". PipelineOptions::dynamic_shapes allows that");
  if (is_new || always_headers_) send_header(header, name);
  for (size_t i = 0; i < value.tensors.size(); ++i) {
    const auto& tensor = value.tensors[i];
    if (!tensor.defined()) continue;
    auto payload = payload_of(tensor);
    if (payload.numel() > 0) send_tensor(std::move(payload), name, "tensor", i);
  }
  if (!value.numbers.empty()) send_tensor(to_tensor(value.numbers, mesh_.device()), name, "numbers", 0);
}

void Messages::send_tensor(at::Tensor tensor, const MessageName& name, const char* what, size_t index) {
  auto work = communicator_->send(tensor, static_cast<int>(name.peer), c10::str(name.text, ": ", what, " ", index));
  in_flight_.emplace_back(std::move(work), std::move(tensor));
}

void Messages::send_header(const MessageHeader& header, const MessageName& name) {
  const auto text = header.to_text();
  send_tensor(at::full({1}, static_cast<int64_t>(text.size()), at::TensorOptions(at::kLong).device(mesh_.device())), name,
              "header", 0);
  auto bytes = at::empty({std::ssize(text)}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  send_tensor(bytes.to(mesh_.device()), name, "header", 1);
}

MessageHeader Messages::receive_header(const MessageName& name) {
  const auto peer = static_cast<int>(name.peer);
  const auto options = at::TensorOptions(mesh_.device());
  const auto length = at::empty({1}, options.dtype(at::kLong));
  communicator_->receive(length, peer, name.text + ": header 0").wait();
  auto bytes = at::empty({length.item<int64_t>()}, options.dtype(at::kByte));
  communicator_->receive(bytes, peer, name.text + ": header 1").wait();
  bytes = bytes.cpu();
  return MessageHeader::of_text({static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel())});
}

Incoming Messages::ask(const MessageName& name) {
  Incoming incoming;
  if (knows(name)) {
    incoming.header = received_.at({name.peer, name.shape});
  } else {
    incoming.header = receive_header(name);
    received_.insert_or_assign({name.peer, name.shape}, incoming.header);
  }
  const auto receive = [&](const at::Tensor& tensor, const char* what, size_t index) {
    if (tensor.numel() == 0) return;
    incoming.works.push_back(
        communicator_->receive(tensor, static_cast<int>(name.peer), c10::str(name.text, ": ", what, " ", index)));
  };
  for (const auto& each : incoming.header.tensors) {
    auto& payload = incoming.payloads.emplace_back();
    if (!each.dtype) continue;
    payload = at::empty(each.sizes, at::TensorOptions(*each.dtype).device(mesh_.device()));
    receive(payload, "tensor", incoming.payloads.size() - 1);
  }
  incoming.numbers = at::empty({incoming.header.numbers}, at::TensorOptions(at::kLong).device(mesh_.device()));
  receive(incoming.numbers, "numbers", 0);
  return incoming;
}

FlatValue Messages::take(Incoming incoming) const {
  for (auto& work : incoming.works) work.wait();
  FlatValue value{.structure = incoming.header.structure};
  for (size_t i = 0; i < incoming.payloads.size(); ++i)
    value.tensors.push_back(tensor_of(incoming.payloads[i], incoming.header.tensors[i], mesh_));
  const auto numbers = incoming.numbers.cpu();
  const auto* const first = numbers.const_data_ptr<int64_t>();
  value.numbers.assign(first, first + numbers.numel());
  return value;
}

void Messages::drop_sent() {
  while (!in_flight_.empty() && in_flight_.front().first.is_completed()) {
    in_flight_.front().first.wait(); // an error of it is this rank's too
    in_flight_.pop_front();
  }
}

void Messages::wait_for_sent() {
  for (auto& [work, tensor] : in_flight_) work.wait();
  in_flight_.clear();
}

} // namespace tessera::internal::pipeline
