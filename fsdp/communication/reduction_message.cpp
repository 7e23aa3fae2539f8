#include <tessera/fsdp/communication/reduction_message.h>

#include <ATen/TensorOperators.h>
#include <ATen/ceil_div.h>
#include <c10/core/ScalarType.h>
#include <c10/util/accumulate.h>

#include <algorithm>

#include <tessera/base/tensor_over.h>

namespace tessera {

int64_t GradientPiece::numel() const { return c10::multiply_integers(sizes); }

namespace internal {

namespace {

constexpr int64_t kMessageAlignment = 16;

/// The bytes of a range that is sent as it is, as numbers.
at::Tensor numbers_at(const at::Tensor& bytes, const CodedRange& range, at::ScalarType dtype) {
  return tensor_over(bytes.storage(), bytes.storage_offset() + range.byte, {range.numel}, dtype);
}

} // namespace

ReductionMessage ReductionMessage::moved(int64_t elements, int64_t bytes_on) const {
  auto result = *this;
  for (auto* ranges : {&result.raw, &result.coded}) {
    for (auto& range : *ranges) {
      range.first += elements;
      range.byte += bytes_on;
    }
  }
  return result;
}

int64_t ReductionMessages::flag_bytes() const {
  return at::round_up(static_cast<int64_t>(layout_->names.size()), kMessageAlignment);
}

void ReductionMessages::add(ReductionMessage& message, size_t parameter, int64_t first, int64_t numel) const {
  if (numel == 0) return;
  const bool is_coded = is_coded_[parameter];
  if (is_coded) message.parameters.push_back(parameter);
  (is_coded ? message.coded : message.raw).push_back({first, numel, message.bytes});
  const auto bytes = is_coded ? codec_.bytes(numel) : numel * static_cast<int64_t>(c10::elementSize(layout_->dtype));
  message.bytes = at::round_up(message.bytes + bytes, kMessageAlignment);
}

ReductionMessage ReductionMessages::of_chunks(int64_t first, int64_t chunks) const {
  ReductionMessage message{.bytes = flag_bytes()};
  for (int64_t k = 0; k < chunks; ++k) {
    for (const auto& piece : layout_->chunks[static_cast<size_t>(first + k)])
      add(message, piece.parameter, k * layout_->chunk_numel + piece.offset, piece.numel());
  }
  return message;
}

ReductionMessage ReductionMessages::of_part(int64_t chunk, int64_t part, int64_t parts) const {
  const auto& pieces = layout_->chunks[static_cast<size_t>(chunk)];
  int64_t blocks = 0, before = 0;
  for (const auto& piece : pieces) blocks += is_coded_[piece.parameter] ? codec_.blocks(piece.numel()) : 0;
  const int64_t begin = blocks * part / parts, end = blocks * (part + 1) / parts;
  ReductionMessage message{.bytes = flag_bytes()};
  for (const auto& piece : pieces) {
    const int64_t numel = piece.numel();
    if (!is_coded_[piece.parameter]) {
      if (part == 0) add(message, piece.parameter, piece.offset, numel);
      continue;
    }
    const int64_t own = codec_.blocks(numel), first = std::clamp(begin - before, int64_t{0}, own) * codec_.block;
    const int64_t last = std::min(numel, std::clamp(end - before, int64_t{0}, own) * codec_.block);
    if (last > first) add(message, piece.parameter, piece.offset + first, last - first);
    before += own;
  }
  return message;
}

void ReductionMessages::write(const ReductionMessage& message, const at::Tensor& values, const at::Tensor& bytes,
                              const at::Tensor& residual, const at::Tensor& flagged) const {
  for (const auto& range : message.raw)
    numbers_at(bytes, range, layout_->dtype).copy_(values.narrow(0, range.first, range.numel));
  if (!residual.defined()) return encode(codec_, message.coded, values, bytes);
  const auto flags = flagged.narrow(0, layout_->flags, static_cast<int64_t>(layout_->names.size()));
  flags.is_cpu() ? encode_on_host(message, values, bytes, residual, flags)
                 : encode_on_device(message, values, bytes, residual, flags);
}

void ReductionMessages::encode_on_host(const ReductionMessage& message, const at::Tensor& values, const at::Tensor& bytes,
                                       const at::Tensor& residual, const at::Tensor& flags) const {
  const auto wide = flags.to(at::kDouble);
  std::vector<CodedRange> with_residual, alone;
  for (size_t i = 0; i < message.coded.size(); ++i)
    (wide.const_data_ptr<double>()[message.parameters[i]] != 0 ? with_residual : alone).push_back(message.coded[i]);
  encode(codec_, with_residual, values, bytes, residual);
  encode(codec_, alone, values, bytes);
}

/// The flags decide on the device what stays for another step: the host would wait until they are known.
void ReductionMessages::encode_on_device(const ReductionMessage& message, const at::Tensor& values, const at::Tensor& bytes,
                                         const at::Tensor& residual, const at::Tensor& flags) const {
  const auto is_used = flags.ne(0), is_unused = is_used.logical_not();
  std::vector<at::Tensor> waiting;
  const auto part = [&](size_t i) { return residual.narrow(0, message.coded[i].first, message.coded[i].numel); };
  const auto of = [&](const at::Tensor& flag, size_t i) { return flag.select(0, static_cast<int64_t>(message.parameters[i])); };
  for (size_t i = 0; i < message.coded.size(); ++i) {
    waiting.push_back(part(i).mul(of(is_unused, i)));
    part(i).mul_(of(is_used, i));
  }
  encode(codec_, message.coded, values, bytes, residual);
  for (size_t i = 0; i < message.coded.size(); ++i) part(i).add_(waiting[i]);
}

void ReductionMessages::read(const ReductionMessage& message, const at::Tensor& bytes, const at::Tensor& values,
                             DecodeInto into) const {
  for (const auto& range : message.raw) {
    const auto from = numbers_at(bytes, range, layout_->dtype), to = values.narrow(0, range.first, range.numel);
    if (into == DecodeInto::kAdd) {
      to.add_(from);
    } else {
      to.copy_(from);
    }
  }
  decode(codec_, message.coded, bytes, values, into);
}

void ReductionMessages::write_flags(const at::Tensor& values, const at::Tensor& bytes, int64_t byte) const {
  const auto count = static_cast<int64_t>(layout_->names.size());
  bytes.narrow(0, byte, count).copy_(values.narrow(0, layout_->flags, count).ne(0));
}

void ReductionMessages::read_flags(const at::Tensor& messages, const at::Tensor& values) const {
  const auto count = static_cast<int64_t>(layout_->names.size());
  const auto any = messages.narrow(1, 0, count).amax({0});
  const auto chunks = values.view({-1, layout_->chunk_numel}).narrow(1, layout_->flags, count);
  chunks.copy_(any.unsqueeze(0).expand_as(chunks));
}

} // namespace internal

} // namespace tessera
