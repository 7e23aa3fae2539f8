#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/checkpoint/bytes/checksum.h>
#include <tessera/checkpoint/bytes/file.h>
#include <tessera/checkpoint/bytes/pickle_writer.h>
#include <tessera/checkpoint/bytes/zip.h>
#include <tessera/checkpoint/export/export.h>
#include <tessera/checkpoint/formats/module_tree.h>
#include <tessera/checkpoint/torch_file.h>
#include <zlib.h>

#include <cstring>
#include <iterator>
#include <set>
#include <utility>

// The file begins as torch.save writes it without a zip archive: pickles, then storages one after another, each with its size
// before it. It ends as the zip archive that torch::save writes, whose entries for the storages have their data in those. The
// header that the archive needs before each of them is, for Python, a storage of bytes that no tensor refers to.

namespace tessera::internal {

namespace {

constexpr int64_t kAlignment = 64; // of data, as in PyTorch's archives
constexpr int64_t kSizeBytes = 8;  // what stands before a storage

// The pickle of 0x1950a86a20f9469cfc6c, by which torch.load knows the format. Without the protocol that begins it elsewhere, by
// which LibTorch would take the file for one that is no archive.
constexpr const char kMagic[] = "\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.";
constexpr int64_t kProtocol = 1001;

struct Storage {
  ZipEntry entry;
  at::ScalarType dtype;
  int64_t size = 0;         // as it stands before the storage: elements; bytes where Python has no storage class for the dtype
  int64_t header_bytes = 0; // of the storage with the header
};

struct Layout {
  std::string head;
  std::vector<Storage> storages;                            // of the plan's tensors
  std::vector<std::pair<std::string, std::string>> records; // the others of the archive: name, content
  int64_t storages_end = 0;
};

int64_t aligned(int64_t position) { return (position + kAlignment - 1) / kAlignment * kAlignment; }

// Counted from where the first one begins, which is aligned.
std::vector<Storage> place_storages(const SavePlan& plan) {
  std::vector<Storage> storages;
  int64_t position = 0;
  for (const auto& [what, parts] : plan.tensors) {
    const auto elements = whole(what.sizes).numel();
    ZipEntry entry{fmt::format("archive/data/{}", storages.size()),
                   elements * static_cast<int64_t>(c10::elementSize(what.dtype))};
    entry.header_begin = position + kSizeBytes;
    entry.data_begin = aligned(entry.header_begin + least_zip_header(entry.name, entry.bytes) + kZipPadding + kSizeBytes);
    position = entry.data_begin + entry.bytes;
    const auto header_bytes = entry.data_begin - kSizeBytes - entry.header_begin;
    const auto size = has_storage_class(what.dtype) ? elements : entry.bytes;
    storages.push_back({std::move(entry), what.dtype, size, header_bytes});
  }
  return storages;
}

std::string key_of(size_t storage) { return std::to_string(storage); }
std::string header_key_of(size_t storage) { return "header " + std::to_string(storage); }

// An OrderedDict. Each name stands there twice, first with the storage of the header, so that torch.load reads past it.
std::string state_pickle(const SavePlan& plan, const std::vector<Storage>& storages) {
  PickleWriter out;
  out.name("collections", "OrderedDict");
  out.empty_tuple();
  out.call();
  out.open();
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    const auto& what = plan.tensors[i].what;
    out.text(what.name);
    write_byte_storage(out, header_key_of(i), storages[i].header_bytes);
    const auto write = [&](const std::string& name) {
      out.text(name);
      write_tensor(out, what.dtype, what.sizes, key_of(i), /*for_python=*/true);
    };
    write(what.name);
    for (const auto& alias : what.aliases) write(alias);
  }
  for (const auto& [name, value] : plan.values) {
    out.text(name);
    write_value(out, value);
  }
  out.close_dict();
  return std::move(out).take();
}

std::string keys_pickle(size_t storages) {
  PickleWriter out;
  out.empty_list();
  out.open();
  for (size_t i = 0; i < storages; ++i) {
    out.text(header_key_of(i));
    out.text(key_of(i));
  }
  out.close_list();
  return std::move(out).take();
}

// What torch.save says about the machine; `padding` aligns what follows.
std::string system_pickle(int64_t padding) {
  PickleWriter out;
  out.empty_dict();
  out.open();
  out.text("protocol_version");
  out.integer(kProtocol);
  out.text("little_endian");
  out.boolean(true);
  out.text("padding");
  out.text(std::string(static_cast<size_t>(padding), ' '));
  out.close_dict();
  return std::move(out).take();
}

std::string head_of(const SavePlan& plan, const std::vector<Storage>& storages) {
  PickleWriter protocol;
  protocol.integer(kProtocol);
  const auto begin = kMagic + std::move(protocol).take();
  const auto end = state_pickle(plan, storages) + keys_pickle(storages.size());
  const auto bytes = std::ssize(begin) + std::ssize(system_pickle(0)) + std::ssize(end);
  return begin + system_pickle(aligned(bytes) - bytes) + end;
}

// The records that LibTorch reads beside the storages.
std::vector<std::pair<std::string, std::string>> records_of(const SavePlan& plan, const std::vector<std::string>& submodules) {
  std::vector<std::pair<std::string, ModuleField>> fields;
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    const auto& what = plan.tensors[i].what;
    const StoredTensor tensor{what.dtype, what.sizes, key_of(i)};
    fields.emplace_back(what.name, tensor);
    for (const auto& alias : what.aliases) fields.emplace_back(alias, tensor);
  }
  for (const auto& [name, value] : plan.values) fields.emplace_back(name, value);
  auto [pickle, code] = module_archive(fields, submodules);
  PickleWriter constants;
  constants.empty_tuple();
  return {{"archive/data.pkl", std::move(pickle)},
          {"archive/code/__torch__.py", std::move(code)},
          {"archive/constants.pkl", std::move(constants).take()},
          {"archive/version", "3\n"},
          {"archive/byteorder", "little"}};
}

Layout lay_out(const SavePlan& plan, const std::vector<std::string>& submodules) {
  Layout layout;
  layout.storages = place_storages(plan);
  layout.head = head_of(plan, layout.storages);
  layout.records = records_of(plan, submodules);
  layout.storages_end = std::ssize(layout.head);
  for (auto& storage : layout.storages) {
    storage.entry.header_begin += std::ssize(layout.head);
    storage.entry.data_begin += std::ssize(layout.head);
    layout.storages_end = storage.entry.data_begin + storage.entry.bytes;
  }
  return layout;
}

uint32_t crc_of(const void* data, size_t bytes) {
  return static_cast<uint32_t>(::crc32_z(0, static_cast<const Bytef*>(data), bytes));
}

// Writes this rank's parts. The CRC of each storage as far as it comes from them: that of the whole is those of all ranks, xored.
std::vector<uint32_t> write_storages(const Layout& layout, const std::vector<OwnedPart>& parts,
                                     const std::filesystem::path& path) {
  std::vector<uint32_t> crcs(layout.storages.size(), 0);
  if (parts.empty()) return crcs;
  auto file = File::open_to_write(path);
  for (const auto& part : parts) {
    const auto position = static_cast<size_t>(part.tensor);
    const auto& storage = layout.storages[position];
    const auto end = storage.entry.data_begin + storage.entry.bytes;
    write_into_whole(file, part, storage.dtype, storage.entry.data_begin, [&](const char* data, int64_t bytes, int64_t offset) {
      const auto crc = crc_of(data, static_cast<size_t>(bytes));
      crcs[position] ^= static_cast<uint32_t>(::crc32_combine(crc, 0, end - offset - bytes));
    });
  }
  file.sync_and_close();
  return crcs;
}

void write_headers(File& file, const Layout& layout) {
  for (const auto& [entry, dtype, size, header_bytes] : layout.storages) {
    auto header = zip_header(entry);
    std::memcpy(header.data() + header_bytes, &size, kSizeBytes);
    file.write_at(&header_bytes, kSizeBytes, entry.header_begin - kSizeBytes);
    file.write_at(header.data(), header.size(), entry.header_begin);
  }
}

void write_records(File& file, const Layout& layout) {
  std::vector<ZipEntry> entries;
  for (const auto& storage : layout.storages) entries.push_back(storage.entry);
  auto position = layout.storages_end;
  for (const auto& [name, content] : layout.records) {
    ZipEntry entry{name, std::ssize(content), position, 0, crc_of(content.data(), content.size())};
    entry.data_begin = aligned(position + least_zip_header(name, entry.bytes) + kZipPadding);
    const auto bytes = zip_header(entry) + content;
    file.write_at(bytes.data(), bytes.size(), position);
    position += std::ssize(bytes);
    entries.push_back(std::move(entry));
  }
  const auto directory = zip_directory(entries, position);
  file.write_at(directory.data(), directory.size(), position);
}

void finish(Layout& layout, const std::vector<std::string>& crcs_of_ranks, const std::filesystem::path& path) {
  for (const auto& text : crcs_of_ranks) {
    const auto json = parse_json(text, "checkpoint: a rank's message");
    const auto crcs = JsonView(json, "checkpoint: a rank's message")["crcs"].non_negatives();
    for (size_t i = 0; i < crcs.size(); ++i) layout.storages.at(i).entry.crc ^= static_cast<uint32_t>(crcs[i]);
  }
  auto file = File::open_to_write(path);
  write_headers(file, layout);
  write_records(file, layout);
  file.sync_and_close();
}

/// The submodules that any rank has.
std::vector<std::string> submodules_of(const std::vector<std::string>& messages) {
  std::set<std::string> all;
  for (const auto& text : messages) {
    const auto json = parse_json(text, "checkpoint: a rank's message");
    for (const auto& name : JsonView(json, "checkpoint: a rank's message")["submodules"].strings()) all.insert(name);
  }
  return {all.begin(), all.end()};
}

// A name with nothing in it is renamed as a tensor in it would be. It is left out where `rename` does not know such a one.
std::vector<std::string> renamed_submodules(const std::vector<std::string>& names, const NameMap& rename) {
  if (!rename) return names;
  const std::string leaf = ".weight";
  std::vector<std::string> result;
  for (const auto& name : names) {
    try {
      const auto tensor = rename(name + leaf);
      if (tensor.ends_with(leaf) && tensor.size() > leaf.size()) result.push_back(tensor.substr(0, tensor.size() - leaf.size()));
    } catch (const std::exception&) { // NOLINT(bugprone-empty-catch): of names, as `map.at` knows them
    }
  }
  return result;
}

void write_torch(SaveSession& session, const SavePlan& plan, const std::vector<OwnedPart>& parts, const NameMap& rename) {
  Layout layout;
  const auto path = session.file();
  session.all_agree("lay out", [&] {
    layout = lay_out(renamed(plan, rename), renamed_submodules(submodules_of(session.said()), rename));
    if (session.ranks().rank() == 0) {
      auto file = File::create(path);
      file.reserve(layout.storages_end);
      file.write_at(layout.head.data(), layout.head.size(), 0);
      file.sync_and_close();
    }
    return layout.head;
  });
  const auto crcs = session.all("save", [&] { return dump_json({{"crcs", write_storages(layout, parts, path)}}, "checkpoint"); });
  session.commit([&] { finish(layout, crcs, path); });
}

} // namespace

} // namespace tessera::internal

namespace tessera::checkpoint {

void save_torch(const StateDict& state, const std::filesystem::path& file, const TorchFileOptions& options) {
  const auto tell = [&](const internal::Snapshot&) {
    return internal::dump_json({{"submodules", state.submodules()}}, "checkpoint");
  };
  internal::Export to(state, file, internal::ExportOptions(options), {internal::Staged::kFile}, "a .pt file", tell);
  internal::write_torch(to.session(), to.plan(), to.parts(), options.rename);
}

} // namespace tessera::checkpoint
