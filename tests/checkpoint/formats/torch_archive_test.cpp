// Files of torch.save, sound and broken, made by hand.
#include <gmock/gmock.h>
#include <tessera/checkpoint/bytes/pickle_writer.h>
#include <tessera/checkpoint/formats/open.h>
#include <tessera/checkpoint/formats/torch_archive.h>
#include <tessera/checkpoint/torch_file.h>
#include <torch/torch.h>

#include <tessera/tests/checkpoint/torch_archives.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tessera::checkpoint::torch_archive_test {
namespace {

using internal::PickleWriter;
using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::pickle_of;
using testing::TemporaryFolder;
using testing::write_archive;

// A dict with one entry, "w".
std::string dict_with(const std::function<void(PickleWriter&)>& write) {
  return pickle_of([&](PickleWriter& out) {
    out.empty_dict();
    out.open();
    out.text("w");
    write(out);
    out.close_dict();
  });
}

void write_pair(PickleWriter& out) { internal::write_tensor(out, at::kFloat, {2}, "0", /*for_python=*/true); }

std::string error_in(const std::filesystem::path& file) {
  return error_of([&] { internal::index_of_torch_file(file); });
}

TEST(TorchArchive, ConjugateAndNegativeViewsAreErrors) {
  const TemporaryFolder folder;
  const auto file = folder.path() / "model.pt";
  const auto write = [&](const std::string& bit) {
    write_archive(file, dict_with([&](PickleWriter& out) { testing::write_view(out, bit); }), std::string(16, '\0'));
  };
  write("");
  EXPECT_EQ(internal::index_of_torch_file(file).tensors.at(0).dtype, at::kComplexFloat);
  for (const auto* bit : {"conj", "neg"}) {
    write(bit);
    EXPECT_THAT(error_in(file), HasSubstr("model.pt: \"w\" is stored as a conjugate or negative view"));
  }
}

// The first bytes of what torch.save writes with _use_new_zipfile_serialization=False, by the protocols of pickle.
TEST(TorchArchive, AFileWithoutAZipArchiveIsAnError) {
  const TemporaryFolder folder;
  const std::string magic = "\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.";
  const std::string frame("\x95\x0d\0\0\0\0\0\0\0", 9);
  for (const auto& begin : {"\x80\x02" + magic + "\x80\x02M\xe9\x03.", "\x80\x04" + frame + magic + "\x80\x04M\xe9\x03."}) {
    const auto file = folder.write("model.pt", begin + std::string(100, '\0'));
    EXPECT_THAT(error_of([&] { internal::open_checkpoint(file); }),
                ::testing::AllOf(HasSubstr("model.pt was written without a zip archive"),
                                 HasSubstr("which is not read: load it in Python and save it again")));
  }
}

// Never the words of the zip archive's reader.
TEST(TorchArchive, WhereverItIsCutShortTheErrorSaysSo) {
  const TemporaryFolder folder;
  const auto file = folder.path() / "model.pt";
  write_archive(file, dict_with(write_pair), std::string(8, '\0'));
  const auto of_torch_save = testing::read_text(file);
  StateDict state;
  state.add("w", torch::ones({2}));
  save_torch(state, file, {.overwrite = true});
  const auto of_save_torch = testing::read_text(file);
  for (const auto& [whole, start] : {std::pair(of_torch_save, size_t{4}), {of_save_torch, size_t{8}}}) {
    for (size_t bytes = 0; bytes < whole.size(); ++bytes) {
      testing::write_text(file, whole.substr(0, bytes));
      const auto error = error_of([&] { internal::open_checkpoint(file); });
      const auto expected = bytes < start ? c10::str("model.pt is no checkpoint, or is cut short: its ", bytes,
                                                     " bytes begin neither as a zip archive of torch.save nor as a safetensors "
                                                     "file. Copy it again, or save it again")
                                          : c10::str("model.pt: no directory of a zip archive is at the end of the ", bytes,
                                                     " bytes: the file is cut short. Copy it again, or save it again");
      ASSERT_THAT(error, HasSubstr(expected)) << bytes << " of " << whole.size();
    }
  }
}

TEST(TorchArchive, ADamagedDirectoryIsAnErrorOfTheFile) {
  const TemporaryFolder folder;
  const auto file = folder.path() / "model.pt";
  write_archive(file, dict_with(write_pair), std::string(8, '\0'));
  const auto whole = testing::read_text(file);
  const auto directory = whole.find("PK\x01\x02"), end = whole.rfind("PK\x05\x06");
  ASSERT_NE(directory, std::string::npos);
  for (size_t byte = directory; byte < whole.size(); ++byte) {
    for (const char value : {'\0', '\xff', 'P'}) {
      auto damaged = whole;
      damaged[byte] = value;
      testing::write_text(file, damaged);
      const auto error = error_in(file);
      if (error != "no error") EXPECT_THAT(error, AllOf(HasSubstr("/model.pt"), Not(HasSubstr("inline_container")))) << byte;
    }
  }
  auto damaged = whole;
  damaged.replace(directory, end - directory, std::string(end - directory, '\x7f'));
  testing::write_text(file, damaged);
  EXPECT_THAT(error_in(file), HasSubstr(c10::str("/model.pt: the directory of the zip archive does not fit it, or torch.save did "
                                                 "not write it: the ",
                                                 whole.size(), " bytes are damaged. Copy the file again, or save it again")));
}

TEST(TorchArchive, ACommentMayFollowTheDirectory) {
  const TemporaryFolder folder;
  const auto file = folder.path() / "model.pt";
  write_archive(file, dict_with(write_pair), std::string(8, '\0'));
  const auto whole = testing::read_text(file);
  for (const size_t bytes : {1, 1000, 65'000}) {
    auto longer = whole + std::string(bytes, 'c');
    longer[whole.size() - 2] = static_cast<char>(bytes & 0xff);
    longer[whole.size() - 1] = static_cast<char>(bytes >> 8);
    testing::write_text(file, longer);
    EXPECT_EQ(error_in(file), "no error") << bytes;
  }
}

TEST(TorchArchive, AFileThatIsNoneIsAnError) {
  const TemporaryFolder folder;
  for (const std::string text : {"", "P", "not a checkpoint at all", "PK\x03\x04 not a zip archive"}) {
    const auto file = folder.write("model.bin", text);
    EXPECT_THAT(error_of([&] { internal::open_checkpoint(file); }),
                AllOf(HasSubstr("/model.bin"), HasSubstr(c10::str(text.size(), " bytes")), HasSubstr("is cut short"),
                      HasSubstr("Copy it again, or save it again")));
  }
}

TEST(TorchArchive, CompressedDataIsAnError) {
  const TemporaryFolder folder;
  const auto file = folder.path() / "model.pt";
  write_archive(file, dict_with(write_pair), std::string(1000, '\0'));
  EXPECT_EQ(error_in(file), "no error");
  write_archive(file, dict_with(write_pair), std::string(1000, '\0'), /*compress=*/true);
  EXPECT_THAT(error_in(file), HasSubstr("model.pt: \"w\": its data is compressed"));
}

TEST(TorchArchive, ParametersAreTensors) {
  const TemporaryFolder folder;
  const auto file = folder.path() / "model.pt";
  for (const auto* function : {"_rebuild_parameter", "_rebuild_parameter_with_state"}) {
    const auto write = [&](PickleWriter& out) {
      out.name("torch._utils", function);
      out.open();
      write_pair(out);
      out.boolean(true); // requires_grad
      out.close_tuple();
      out.call();
    };
    write_archive(file, dict_with(write), std::string(8, '\0'));
    const auto index = internal::index_of_torch_file(file);
    ASSERT_EQ(index.tensors.size(), 1) << function;
    EXPECT_EQ(index.tensors[0].name, "w");
    EXPECT_EQ(index.tensors[0].sizes, std::vector<int64_t>{2});
  }
}

// It may name one list again and again. Its tensors can be read all the same.
TEST(TorchArchive, WhatItHoldsDoesNotOutgrowIt) {
  const TemporaryFolder folder;
  const auto file = folder.path() / "model.pt";
  const auto write = [&](int entries) {
    std::string pickle = "\x80\x02}(", list = "](";
    for (int i = 0; i < 1000; ++i) list += "K\x01";
    for (int i = 0; i < entries; ++i) {
      const auto name = std::to_string(i);
      pickle += "X" + std::string{static_cast<char>(name.size()), 0, 0, 0} + name + (i == 0 ? list + "eq\x01" : "h\x01");
    }
    write_archive(file, pickle + "u.", "");
  };
  write(10);
  EXPECT_EQ(internal::index_of_torch_file(file).values.size(), 10);
  write(1000);
  const auto values = internal::index_of_torch_file(file).values;
  EXPECT_GT(values.size(), 10);
  EXPECT_LT(values.size() * 1000 * sizeof(int64_t), 64 * std::filesystem::file_size(file));
}

TEST(TorchArchive, ATextThatManyHoldDoesNotKeepItFromBeingRead) {
  const TemporaryFolder folder;
  const auto file = folder.path() / "model.pt";
  const auto write = [](PickleWriter& out) {
    write_pair(out);
    for (int i = 0; i < 200; ++i) {
      out.text(std::to_string(i));
      out.text(std::string(10'000, 'x')); // stored once
    }
    out.text("w2");
    write_pair(out);
  };
  write_archive(file, dict_with(write), std::string(8, '\0'));
  const auto index = internal::index_of_torch_file(file);
  EXPECT_EQ(index.tensors.size(), 2);
  EXPECT_LT(index.values.size(), 200);
}

// A name takes its place for each value that it leads to.
TEST(TorchArchive, NamesThatOutgrowItAreAnError) {
  const TemporaryFolder folder;
  const auto file = folder.path() / "model.pt";
  std::string pickle = "\x80\x02}(X\x01" + std::string(3, '\0') + "a}(";
  for (int i = 0; i < 200; ++i) pickle += "X\x03" + std::string(3, '\0') + std::to_string(100 + i) + "K\x01";
  pickle += "uq\x01";
  for (int i = 0; i < 200; ++i) {
    pickle += "X\xc8" + std::string(3, '\0') + std::string(197, 'n') + std::to_string(100 + i) + "h\x01";
  }
  write_archive(file, pickle + "u.", "");
  EXPECT_THAT(error_in(file), HasSubstr("is among values that many others hold"));
}

TEST(TorchArchive, ObjectsOfOtherClassesArePassedOver) {
  const TemporaryFolder folder;
  const auto file = folder.path() / "model.pt";
  const auto write_entries = [](PickleWriter& out) {
    out.open();
    out.text("a");
    out.integer(1);
    out.close_dict();
  };
  const auto write = [&](PickleWriter& out) {
    write_pair(out);
    out.text("deque");
    out.name("collections", "deque");
    out.empty_tuple();
    out.call();
    out.open();
    out.integer(1);
    out.close_list();
    out.text("defaultdict");
    out.name("collections", "defaultdict");
    out.empty_tuple();
    out.call();
    write_entries(out);
    out.text("own");
    out.object("__main__", "OwnDict");
    write_entries(out);
    out.text("step");
    out.integer(7);
  };
  write_archive(file, dict_with(write), std::string(8, '\0'));
  const auto index = internal::index_of_torch_file(file);
  EXPECT_EQ(index.tensors.size(), 1);
  ASSERT_EQ(index.values.size(), 1);
  EXPECT_EQ(index.values[0].first, "step");
}

} // namespace
} // namespace tessera::checkpoint::torch_archive_test
