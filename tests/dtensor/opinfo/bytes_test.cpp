// What operators on DTensors send, beside what Python's DTensor sends for the same calls (python_bytes.py).
//
//   TESSERA_OPINFO_CALLS   the folder of the exported calls and of python_bytes.json (set by ctest)
#include <fmt/format.h>
#include <tessera/dtensor/debug.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include <tessera/tests/dtensor/layouts.h>
#include "opinfo_replay.h"

namespace tessera::testing::bytes_test {
namespace {

/// What rank 0 sends to others.
struct Sent {
  double bytes = 0;
  int64_t collectives = 0;
  Sent operator+(const Sent& other) const { return {bytes + other.bytes, collectives + other.collectives}; }
  Sent operator-(const Sent& other) const { return {bytes - other.bytes, collectives - other.collectives}; }
};

/// By a call and its backward, and `forward` by the call alone.
struct SentByCall {
  Sent all;
  double forward = 0;
};

/// A call of a file, with placements of its tensors, and what is sent in Python.
struct Case {
  std::string file;
  size_t call;
  std::vector<int64_t> mesh;
  std::vector<Placements> placements;
  SentByCall python;
};

std::vector<Case> read_cases() {
  std::vector<Case> cases;
  std::ifstream stream(std::filesystem::path(std::getenv("TESSERA_OPINFO_CALLS")) / "python_bytes.json");
  for (const auto& json : nlohmann::json::parse(stream)) {
    Case entry{json["file"], json["call"], json["mesh"], {}, {{json["bytes"], json["collectives"]}, json["forward"]}};
    for (const auto& text : json["placements"]) entry.placements.push_back(parse_placements(text.get<std::string>()));
    cases.push_back(std::move(entry));
  }
  return cases;
}

/// Over `communicator` so far: an all-reduce is a reduce-scatter and an all-gather.
Sent sent_over(Communicator& communicator) {
  Sent sent;
  for (int kind = 0; kind < kCollectiveKinds; ++kind) {
    const auto count = communicator.counters().get(static_cast<CollectiveKind>(kind));
    const double times = static_cast<CollectiveKind>(kind) == CollectiveKind::kAllReduce ? 2 : 1;
    sent.bytes += static_cast<double>(count.bytes) * times * (communicator.size() - 1) / communicator.size();
    sent.collectives += count.calls;
  }
  return sent;
}

/// The same over the groups of all dims of `mesh`.
Sent sent_over(const DeviceMesh& mesh) {
  auto sent = mesh.ndim() > 1 ? sent_over(*mesh.flatten().communicator()) : Sent{};
  for (int64_t dim = 0; dim < mesh.ndim(); ++dim) sent = sent + sent_over(*mesh.communicator(dim));
  return sent;
}

struct Outcome {
  SentByCall sent;
  std::string error, moved;
};

/// Runs `call` as python_bytes.py does: results and gradients lie as there.
Outcome run(const OpCall& call, const Case& entry, const DeviceMesh& mesh, Agreement& agreement) {
  Outcome outcome;
  const LogRedistributions log;
  const auto before = sent_over(mesh);
  bool is_forward = true;
  try {
    run_call(call,
             {[&](const at::Tensor& tensor, size_t i) -> at::Tensor { return make(tensor.detach(), mesh, entry.placements[i]); },
              [&] {
                if (std::exchange(is_forward, false)) outcome.sent.forward = (sent_over(mesh) - before).bytes;
              }});
  } catch (const std::exception& error) {
    outcome.error = error.what();
  }
  outcome.sent.all = sent_over(mesh) - before;
  outcome.moved = log.to_string();
  if (!agreement.everyone(outcome.error.empty()) && outcome.error.empty()) outcome.error = "another rank failed";
  return outcome;
}

/// Why a call may send more, and at most how much beside Python's bytes and those of the call's tensors.
struct Reason {
  std::string text;
  double bound;
};

constexpr double kBoundOfOthers = 2;

/// Operators that may send more, as a full run finds them.
const std::vector<std::pair<Reason, std::string>> kReasons{
    {{"Python returns what rank 0 holds, and asks no other", 3}, "item"},
    {{"the draws are those of one device, and depend on all probabilities", 1}, "bernoulli"},
    {{"each gradient of a product is placed by itself, and then moves to where its tensor lies", 1},
     "addmm addmm_ addmv addmv_ baddbmm bmm corrcoef cov linalg_matrix_norm linear matmul mm mv"},
    {{"a number or two of each row are exchanged, of rows of few elements more than the row", 2},
     "_safe_softmax cross_entropy_loss layer_norm log_softmax native_layer_norm nll_loss_nd rms_norm softmax"},
    {{"pieces stay where they lie, and what joins them, as for a gradient, moves each of them", 3},
     "cartesian_prod cat chunk constant_pad_nd dstack gradient hstack narrow pad select split split_with_sizes "
     "split_with_sizes_copy "
     "trapezoid trapz unbind_copy unsafe_chunk vsplit"},
    {{"a rank has nothing of the split dim, which the kernel may refuse", 6}, "aminmax conv3d view_as_complex view_as_real"},
    {{"ranks that hold parts of the indices add their values, and the sum has the size of the tensor", 1}, "index"},
    {{"the gradient of a value is selected from whole tensors", 2}, "masked_fill masked_fill_"},
    {{"tensors of several splits meet, and each operator picks the cheapest one for itself", 2},
     "addcdiv addcmul addcmul_ cosine_embedding_loss floor_divide gather index_select kl_div lerp mul pairwise_distance scatter "
     "scatter_ scatter_add scatter_add_ squeeze take_along_dim triplet_margin_loss"},
};

Reason known_reason(const std::string& name) {
  for (const auto& [reason, names] : kReasons) {
    if ((" " + names + " ").find(" " + name + " ") != std::string::npos) return reason;
  }
  return {"", kBoundOfOthers};
}

/// Why more bytes than in Python are sent; a reason without text where they should not be.
Reason reason_of(const OpCall& call, const SentByCall& sent, const SentByCall& python) {
  if (sent.all.bytes <= python.all.bytes + 0.5) return {"no more", kBoundOfOthers};
  if (sent.all.collectives < python.all.collectives) return {"fewer collectives, which small tensors wait for", kBoundOfOthers};
  const bool has_backward = sent.all.bytes > sent.forward + 0.5;
  if (has_backward && sent.forward < python.forward - 0.5)
    return {"fewer in the forward: the results lie otherwise, and so do their gradients", kBoundOfOthers};
  const auto& name = call.op.schema().name(); // "aten::mm"
  return known_reason(name.substr(name.rfind(':') + 1));
}

/// Of the tensors of a call, which each rank could gather.
double bytes_of(const OpCall& call) {
  double bytes = 0;
  for (const auto& tensor : tensors_of(call.arguments)) bytes += static_cast<double>(tensor.nbytes());
  return bytes;
}

/// Bytes beside those of Python and of the call's tensors.
struct Excess {
  int calls = 0;
  double largest = 0;

  void add(double factor) {
    ++calls;
    largest = std::max(largest, factor);
  }
};

TEST(Bytes, AreNoMoreThanThoseOfPythonsDTensor) {
  if (opinfo_files().empty()) GTEST_SKIP() << "no exported calls";
  std::map<std::vector<int64_t>, DeviceMesh> meshes{{{4}, init_device_mesh(at::kCPU, {4})},
                                                    {{2, 2}, init_device_mesh(at::kCPU, {2, 2})}};
  Agreement agreement(meshes.at({4}));
  std::map<std::string, std::vector<OpCall>> calls;
  const auto folder = std::filesystem::path(std::getenv("TESSERA_OPINFO_CALLS"));
  size_t compared = 0, refused = 0;
  std::map<std::string, Excess> reasons;
  for (const auto& entry : read_cases()) {
    if (!calls.contains(entry.file)) calls[entry.file] = load_calls(folder / (entry.file + ".pt"));
    const auto& call = calls[entry.file].at(entry.call);
    const auto outcome = run(call, entry, meshes.at(entry.mesh), agreement);
    if (!outcome.error.empty()) {
      ++refused;
      continue;
    }
    ++compared;
    if (world_rank() != 0) continue;
    const auto reason = reason_of(call, outcome.sent, entry.python);
    const auto bytes = outcome.sent.all.bytes;
    const auto factor = bytes == 0 ? 0 : bytes / (entry.python.all.bytes + bytes_of(call));
    reasons[reason.text].add(factor);
    EXPECT_LE(factor, reason.bound) << describe(call, entry.placements) << ": " << reason.text;
    EXPECT_NE(reason.text, "") << fmt::format("{}: {} bytes in {} collectives, in Python {} in {}, forward {} and {}\n{}",
                                              describe(call, entry.placements), outcome.sent.all.bytes,
                                              outcome.sent.all.collectives, entry.python.all.bytes, entry.python.all.collectives,
                                              outcome.sent.forward, entry.python.forward, outcome.moved);
  }
  EXPECT_GT(compared, 0U);
  EXPECT_LT(refused, compared / 10);
  if (world_rank() != 0) return;
  std::cout << fmt::format("{} compared, {} refused here\n", compared, refused);
  for (const auto& [reason, excess] : reasons)
    std::cout << fmt::format("  {}: {}, at most {:.2f}\n", reason, excess.calls, excess.largest);
}

} // namespace
} // namespace tessera::testing::bytes_test
