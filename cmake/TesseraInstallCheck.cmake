# What `cmake --install` does first, hence included before any other install rule: a build of some targets, as the quickstart's,
# lacks a part of what is installed, or has one of an older library, and then nothing is written.
set(installed_targets tessera)
if(TESSERA_WITH_CUDA)
  list(APPEND installed_targets tessera_nccl)
endif()
if(TESSERA_BUILD_BENCHMARKS)
  list(APPEND installed_targets tessera_bench)
endif()
if(TESSERA_BUILD_TOOLS)
  list(APPEND installed_targets tessera-checkpoint)
endif()
string(JOIN " " installed_names ${installed_targets})
foreach(target IN LISTS installed_targets)
  install(CODE "
    if(NOT EXISTS \"$<TARGET_FILE:${target}>\")
      message(FATAL_ERROR \"Nothing was installed, for $<TARGET_FILE:${target}> is not built yet. Build it first: \"
        \"cmake --build ${PROJECT_BINARY_DIR} --target ${installed_names}\")
    endif()
    if(NOT \"$<TARGET_FILE:${target}>\" IS_NEWER_THAN \"$<TARGET_FILE:tessera>\")
      message(FATAL_ERROR \"Nothing was installed, for $<TARGET_FILE:${target}> is older than $<TARGET_FILE:tessera>. \"
        \"Build it first: cmake --build ${PROJECT_BINARY_DIR} --target ${installed_names}\")
    endif()")
endforeach()
