#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <tessera/checkpoint/load/load_opened.h>
#include <tessera/checkpoint/read_state_dict.h>
#include <tessera/dtensor/factories.h>

#include <utility>

namespace tessera::internal {

namespace {

at::Tensor make_tensor(const IndexedTensor& saved, const checkpoint::ReadOptions& options) {
  if (!options.mesh) return at::empty(saved.sizes, saved.dtype);
  const auto dims = static_cast<size_t>(options.mesh->ndim());
  auto placements = options.placements.empty() ? Placements(dims, Shard{0}) : options.placements;
  if (saved.sizes.empty()) placements = Placements(dims, Replicate{});
  try {
    return tessera::empty(saved.sizes, *options.mesh, placements, saved.dtype);
  } catch (const c10::Error& error) { // of the placements, which do not know the tensor
    C10_THROW_ERROR(Error, c10::str("tensor \"", saved.name, "\": ", error.what_without_backtrace()));
  }
}

// New tensors and values for what the index holds under names with the prefix.
StateDict make_state(const Index& index, const checkpoint::ReadOptions& options) {
  StateDict state;
  for (const auto& tensor : index.tensors) {
    if (!tensor.copy.of.empty()) continue; // one rank's values of another tensor
    std::vector<std::string> names;
    if (tensor.name.starts_with(options.prefix)) names.push_back(tensor.name);
    for (const auto& alias : tensor.aliases) {
      if (alias.starts_with(options.prefix)) names.push_back(alias);
    }
    if (names.empty()) continue;
    state.add(names[0], make_tensor(tensor, options), {names.begin() + 1, names.end()});
  }
  for (const auto& [name, value] : index.values) {
    if (name.starts_with(options.prefix)) state.set(name, value);
  }
  TORCH_CHECK(state.size() > 0 || options.prefix.empty(), "it holds nothing whose name begins with \"", options.prefix, "\"");
  return state;
}

// What ranks must ask for alike.
std::string describe(const checkpoint::ReadOptions& options) {
  std::string text;
  if (!options.prefix.empty()) text += ", what begins with \"" + options.prefix + "\"";
  if (options.mesh) text += ", on " + options.mesh->to_string();
  if (!options.placements.empty()) text += " as " + tessera::to_string(options.placements);
  return text;
}

void check(const checkpoint::ReadOptions& options) {
  TORCH_CHECK(options.mesh || options.placements.empty(), "ReadOptions::placements are given without a mesh");
  TORCH_CHECK(options.placements.empty() || std::cmp_equal(options.placements.size(), options.mesh->ndim()), "ReadOptions has ",
              options.placements.size(), " placements for a mesh of ", options.mesh->ndim(), " dims");
}

} // namespace

} // namespace tessera::internal

namespace tessera::checkpoint {

namespace {

StateDict read(const std::string& name, const std::function<internal::Opened()>& open, const ReadOptions& options) {
  const internal::Ranks ranks(options.mesh);
  StateDict state;
  const auto open_for_state = [&] {
    internal::check(options);
    auto opened = open();
    state = internal::make_state(opened.index, options);
    return opened;
  };
  internal::load_opened(ranks, "read " + name + internal::describe(options), open_for_state, state,
                        {.allow_unused = true, .verify = options.verify});
  return state;
}

} // namespace

StateDict read_state_dict(const std::filesystem::path& dir, const ReadOptions& options) {
  return read(
      dir.string(), [&] { return internal::open_checkpoint(dir); }, options);
}

StateDict read_state_dict(const Storage& storage, const std::string& name, const ReadOptions& options) {
  return read(
      name, [&] { return internal::open_checkpoint(storage, name); }, options);
}

} // namespace tessera::checkpoint
