#include "embed_minilm/embedding.h"

#include <fmt/format.h>
#include <tessera/checkpoint/hugging_face.h>
#include <tessera/dtensor/api.h>

#include <algorithm>
#include <chrono>
#include <filesystem>

#include "common/files.h"
#include "common/ranks.h"
#include "embed_minilm/sentences.h"

namespace minilm {
namespace {

constexpr size_t kMostShown = 100; // sentences
constexpr const char* kFile = "model.safetensors";

void show_neighbours(const std::vector<Sentence>& sentences, const torch::Tensor& embeddings) {
  const auto similarity = torch::matmul(embeddings, embeddings.t()).fill_diagonal_(-2.0);
  const auto [best, nearest] = similarity.max(1);
  for (size_t i = 0; i < sentences.size(); ++i) {
    const auto row = static_cast<int64_t>(i), other = nearest[row].item<int64_t>();
    fmt::print("{:3}  {}\n     {:.3f}  {:3}  {}\n", i + 1, sentences[i].text, best[row].item<float>(), other + 1,
               sentences[static_cast<size_t>(other)].text);
  }
}

// Whether a save may replace what is at `folder`.
bool holds_nothing_else(const std::filesystem::path& folder) {
  if (!std::filesystem::exists(folder)) return true;
  if (!std::filesystem::is_directory(folder)) return false;
  const std::filesystem::directory_iterator entries(folder);
  return std::all_of(begin(entries), end(entries), [](const auto& entry) { return entry.path().filename() == kFile; });
}

} // namespace

void embed_sentences(SentenceEncoder& encoder, const Options& options) {
  const auto sentences = read_sentences(options.input, [&](std::string_view text) { return encoder.tokenize(text); });
  std::vector<std::vector<int64_t>> ids;
  for (const auto& sentence : sentences) ids.push_back(sentence.ids);
  const bool first = examples::rank() == 0, shown = sentences.size() > 1 && sentences.size() <= kMostShown;
  // Errors now, not after the work.
  TORCH_CHECK(holds_nothing_else(options.output), "--output ", options.output, " is there and holds something else than ", kFile);
  if (first && !options.output.empty()) examples::make_folder_of(options.output);
  const auto start = std::chrono::steady_clock::now();
  const auto embeddings = encoder.embed(ids, options.batch);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  if (shown) {
    const auto whole = tessera::is_dtensor(embeddings) ? tessera::DTensor(embeddings).full_tensor() : embeddings;
    if (first) show_neighbours(sentences, whole.to(torch::kCPU));
  }
  if (first) {
    fmt::print("{} sentence{} in {:.2f} s{}\n", sentences.size(), sentences.size() == 1 ? "" : "s", seconds.count(),
               shown ? "; below each, the one that is most like it" : "");
  }
  if (options.output.empty()) return;
  tessera::StateDict state;
  state.add("embeddings", embeddings);
  tessera::checkpoint::save_hugging_face(state, options.output, {.overwrite = true});
  if (first) fmt::print("embeddings: {}/{}\n", options.output, kFile);
}

} // namespace minilm
