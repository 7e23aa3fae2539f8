#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#include <tessera/base/current_stream.h>
#include <tessera/base/listing.h>
#include <tessera/checkpoint/bytes/checksum.h>
#include <tessera/checkpoint/bytes/parallel.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/formats/reader.h>
#include <tessera/checkpoint/load/load_opened.h>
#include <tessera/checkpoint/load/load_plan.h>
#include <tessera/checkpoint/load/python_state.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>

#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace tessera::internal {

namespace {

constexpr int64_t kJobBytes = int64_t{64} << 20;

// Names that no rank uses.
std::vector<std::string> unused_everywhere(const std::vector<std::string>& messages) {
  std::map<std::string, size_t> ranks_without;
  for (const auto& message : messages) {
    const auto json = parse_json(message, "checkpoint: a rank's message");
    for (const auto& name : json["unused"]) ++ranks_without[name.get<std::string>()];
  }
  std::vector<std::string> names;
  for (const auto& [name, ranks] : ranks_without) {
    if (ranks == messages.size()) names.push_back(name);
  }
  return names;
}

std::vector<std::string> missing_in(const LoadPlan& plan) {
  auto names = plan.missing;
  for (size_t i = 0; i < names.size(); ++i) {
    if (plan.looked_for[i] != names[i]) names[i] += ", looked for as \"" + plan.looked_for[i] + "\"";
  }
  return names;
}

void check_fits(const LoadPlan& plan, const checkpoint::LoadOptions& options) {
  std::string problems, hints;
  if (!plan.missing.empty() && !options.allow_missing) {
    problems += "\nnot in the checkpoint:" + listing(missing_in(plan));
    if (!plan.unused.empty())
      hints +=
          "\nin the checkpoint, and not asked for:" + listing(plan.unused) +
          "\nLoadOptions::rename returns the name in the checkpoint for that of a tensor here; the state of an optimizer follows "
          "its parameters";
    hints += "\nLoadOptions::allow_missing leaves what is not in the checkpoint as it is";
  }
  if (!plan.mismatches.empty()) problems += "\ndifferent in the checkpoint:" + listing(plan.mismatches);
  if (plan.could_cast) hints += "\nLoadOptions::cast converts between dtypes";
  TORCH_CHECK(problems.empty(), "the state does not fit the checkpoint:", problems, hints);
}

// Tensors that share memory here and were saved apart must be equal, or one of the saved ones would be lost silently.
void check_tied(const TensorRead& read, Reader& reader) {
  for (size_t i = 1; i < read.saved.size(); ++i) {
    for (const auto& piece : read.pieces) {
      const Piece other{piece.box, at::empty_like(piece.data, at::MemoryFormat::Contiguous)};
      reader.read(*read.saved[i], other);
      TORCH_CHECK(equal_bytes(other.data, piece.data), "\"", read.name, "\" is tied to \"", read.saved[i]->name,
                  "\", but the checkpoint holds different values for \"", read.saved[0]->name, "\" and \"", read.saved[i]->name,
                  "\"; LoadOptions::filter chooses the name that is loaded");
    }
  }
}

// A part of a tensor that one thread reads.
struct ReadJob {
  const IndexedTensor* from;
  Piece to;
  std::optional<c10::Stream> stream; // of the tensor
};

// Splits what this rank holds into jobs of about the same size.
std::vector<ReadJob> jobs_of(const LoadPlan& plan) {
  std::vector<ReadJob> jobs;
  for (const auto& read : plan.tensors) {
    for (const auto& piece : read.pieces) {
      for (auto& box : split(piece.box, static_cast<int64_t>(piece.data.element_size()), kJobBytes)) {
        auto within = box;
        for (size_t d = 0; d < box.offsets.size(); ++d) within.offsets[d] -= piece.box.offsets[d];
        auto data = narrow(piece.data, within);
        jobs.push_back({read.saved[0], {std::move(box), std::move(data)}, current_stream_if_any(piece.data.device())});
      }
    }
  }
  return jobs;
}

void read_tensors(const LoadPlan& plan, Reader& reader) {
  const c10::NoGradGuard no_grad;
  const auto jobs = jobs_of(plan);
  for (const auto& read : plan.tensors) mark_written(read.tensor); // also where a read fails half way
  for_each_in_parallel(std::ssize(jobs), [&](int64_t i) {
    const auto& job = jobs[static_cast<size_t>(i)];
    const c10::NoGradGuard not_recorded; // counts for one thread
    const c10::OptionalStreamGuard guard(job.stream);
    reader.read(*job.from, job.to);
  });
  for (const auto& read : plan.tensors) check_tied(read, reader);
}

// The parts of a DTensor must come from one saved tensor.
Agreement agreement_on(const LoadTarget& target) {
  std::map<std::string, const at::Tensor*> sources; // sorted: the ranks' states may have other orders
  for (const auto& read : target.plan().tensors) sources[read.name + "\n" + read.saved[0]->name] = &read.tensor;
  Agreement agreement;
  for (const auto& [names, tensor] : sources) {
    if (const auto* meta = dtensor_meta(*tensor)) agreement.add(meta->spec->mesh().ranks(), names);
  }
  target.add_settings(agreement);
  return agreement;
}

// `messages` are the ranks': the names that each left unread, and the index that it read.
void check_agreed(const std::vector<std::string>& messages, const Ranks& ranks, const std::string& step, const std::string& dir,
                  const checkpoint::LoadOptions& options) {
  std::vector<std::string> agreements;
  Json first;
  for (size_t position = 0; position < messages.size(); ++position) {
    const auto json = parse_json(messages[position], dir);
    if (position == 0) first = json["index"];
    TORCH_CHECK(json["index"] == first, dir, " is not the same checkpoint on rank ", ranks.rank_of_job(position), " as on rank ",
                ranks.rank_of_job(0)); // on every rank, so that none reads
    agreements.push_back(json["agreement"].get<std::string>());
  }
  Agreement::check(agreements, ranks, step, "load other tensors, or from other names,");
  const auto unused = unused_everywhere(messages);
  TORCH_CHECK(options.allow_unused || unused.empty(),
              "the checkpoint holds more than the state (LoadOptions::allow_unused ignores it):", listing(unused));
}

} // namespace

checkpoint::LoadReport load_opened(const Ranks& ranks, const std::string& step, const std::function<Opened()>& open,
                                   StateDict& state, const checkpoint::LoadOptions& options) {
  Opened opened;
  LoadTarget target(state);
  int64_t bytes_read = 0;
  const auto messages = ranks.all(step, [&] {
    opened = open();
    auto& plan = target.prepare(opened.index, options, ranks.rank());
    check_fits(plan, options);
    for (const auto& read : plan.tensors) ranks.check_hold_all(read.name, read.tensor);
    find_pieces(plan);
    return dump_json(
        {{"unused", plan.unused}, {"index", to_hex(opened.index.checksum)}, {"agreement", agreement_on(target).to_message()}},
        "checkpoint");
  });
  ranks.all(step, [&] {
    check_agreed(messages, ranks, step, opened.source.name(), options);
    Reader reader(opened.source, opened.index, options.verify && opened.index.has_checksums);
    read_tensors(target.plan(), reader);
    bytes_read = reader.bytes_read();
  });
  target.finish();
  return {target.plan().missing, unused_everywhere(messages), bytes_read};
}

} // namespace tessera::internal

namespace tessera::checkpoint {

namespace {

LoadReport load(StateDict& state, const std::string& name, const std::function<internal::Opened()>& open,
                const LoadOptions& options) {
  const internal::Ranks ranks(options.mesh);
  const auto open_with_own_names = [&] {
    auto opened = open();
    if (options.python) internal::take_names_from_python(opened, *options.python, options, state);
    return opened;
  };
  auto own_names = options;
  if (options.python) own_names.rename = nullptr;
  return internal::load_opened(ranks, "load " + name, open_with_own_names, state, own_names);
}

} // namespace

LoadReport load(StateDict& state, const std::filesystem::path& dir, const LoadOptions& options) {
  return load(
      state, dir.string(), [&] { return internal::open_checkpoint(dir); }, options);
}

LoadReport load(StateDict& state, const Storage& storage, const std::string& name, const LoadOptions& options) {
  return load(
      state, name, [&] { return internal::open_checkpoint(storage, name); }, options);
}

LoadReport load(StateDict&& state, const Storage& storage, const std::string& name, const LoadOptions& options) {
  return load(state, storage, name, options);
}

LoadReport load(StateDict&& state, const std::filesystem::path& dir, const LoadOptions& options) {
  return load(state, dir, options);
}

} // namespace tessera::checkpoint
